"""Lazy reader of Flax's msgpack files: the structure is parsed once, arrays stay in the file until they are read.

The file is untrusted input. Lengths are checked against the file, nesting and the number of values are limited, and
only plain values and Flax's arrays are accepted. The format has no checksum.
"""

import dataclasses
import math
import mmap
import struct
from typing import Any

import numpy as np
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats.safety import DTYPES, check_shape
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import open_inside, open_regular

ARRAY, SCALAR = 1, 3  # Flax's extension types

_CHUNKED = "__msgpack_chunked_array__"
_MAX_DEPTH = 64
_MAX_VALUES = 1_000_000
_MAX_TEXT = 2**16

# First byte of a value -> the struct format of its length, or of the number itself.
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_TEXT = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


@dataclasses.dataclass(frozen=True)
class _Span:
    """A byte range of the file; `code` is the type of an extension, None for plain bytes."""

    start: int
    end: int
    code: int | None = None


class _Malformed(Exception):
    pass


def read_tree(directory: epath.PathLike, name: str) -> dict[str, Any]:
    """Return the nested dictionaries in the file `name` of `directory`.

    Returns:
      Leaves are LazyArray for arrays and numpy scalars (in one piece or chunked), else strings, numbers, None or lists.

    Raises:
      DamagedCheckpoint: the file is truncated, or Flax could not have written it.
      OSError: it cannot be opened.
    """
    with open_inside(directory, name) as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                tree = _Parser(data, 0, len(data)).whole()
                if not isinstance(tree, dict):
                    raise _Malformed("is not a dictionary")
                return _with_arrays(tree, data, directory, name)
        except _Malformed as error:
            raise DamagedCheckpoint(directory, f"{name} {error}") from None
        except ValueError as error:  # from mmap
            raise DamagedCheckpoint(directory, f"{name} is empty") from error


def is_tree(path: epath.PathLike) -> bool:
    """Return whether the file starts like a msgpack file of Flax: with a dictionary whose first key is a string.

    Raises:
      OSError: it cannot be opened.
    """
    with open_regular(path) as file:
        start = file.read(6)
    skipped = {0xDE: 3, 0xDF: 5}.get(start[0], 1) if start else 0
    is_map = bool(start) and (start[0] in _MAPS or 0x81 <= start[0] <= 0x8F)
    return is_map and len(start) > skipped and (start[skipped] in _TEXT or 0xA0 <= start[skipped] <= 0xBF)


class _Parser:
    """A parser of the value in data[position:end]."""

    def __init__(self, data: mmap.mmap, position: int, end: int):
        self._data = data
        self._position = position
        self._end = end
        self._values = 0

    def whole(self) -> Any:
        value = self._value(0)
        if self._position != self._end:
            raise _Malformed(f"goes on after its end, at byte {self._position}")
        return value

    def _value(self, depth: int) -> Any:
        self._values += 1
        if self._values > _MAX_VALUES:
            raise _Malformed(f"has more than {_MAX_VALUES} values")
        if depth > _MAX_DEPTH:
            raise _Malformed(f"is nested more than {_MAX_DEPTH} deep")
        tag = self._number(">B")
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag <= 0x8F:
            return self._map(tag & 0x0F, depth)
        if tag <= 0x9F:
            return self._list(tag & 0x0F, depth)
        if tag <= 0xBF:
            return self._text(tag & 0x1F)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _NUMBERS:
            return self._number(_NUMBERS[tag])
        if tag in _TEXT:
            return self._text(self._number(_TEXT[tag]))
        if tag in _BYTES:
            return self._span(self._number(_BYTES[tag]))
        if tag in _LISTS:
            return self._list(self._number(_LISTS[tag]), depth)
        if tag in _MAPS:
            return self._map(self._number(_MAPS[tag]), depth)
        if tag in _EXTENSIONS:
            return self._extension(self._number(_EXTENSIONS[tag]))
        if tag in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[tag])
        raise _Malformed(f"is not msgpack: byte {self._position - 1} is {tag:#x}")

    def _skip(self, length: int) -> int:
        """Skip `length` bytes and return where they start."""
        start = self._position
        if length > self._end - start:
            raise _Malformed(f"is cut off: {length} bytes should follow byte {start}, {self._end - start} do")
        self._position += length
        return start

    def _number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self._data, self._skip(struct.calcsize(layout)))[0]

    def _span(self, length: int, code: int | None = None) -> _Span:
        return _Span(self._skip(length), self._position, code)

    def _text(self, length: int) -> str:
        if length > _MAX_TEXT:
            raise _Malformed(f"has a text of {length} bytes at byte {self._position}")
        start = self._skip(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise _Malformed(f"has a text that is not UTF-8 at byte {start}") from None

    def _extension(self, length: int) -> _Span:
        code = self._number(">b")
        if code not in (ARRAY, SCALAR):
            raise _Malformed(f"has a value of the unknown extension type {code} at byte {self._position}")
        return self._span(length, code)

    def _list(self, count: int, depth: int) -> list[Any]:
        self._check_count(count)
        return [self._value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        self._check_count(2 * count)
        result = {}
        for _ in range(count):
            at = self._position
            key = self._value(depth + 1)
            if not isinstance(key, str) or "/" in key or not paths.is_plain_relative(key):
                raise _Malformed(f"has a key at byte {at} that is not the name of a parameter")
            if key in result:
                raise _Malformed(f"has the key {key!r} twice")
            result[key] = self._value(depth + 1)
        return result

    def _check_count(self, count: int) -> None:
        if count > self._end - self._position:
            raise _Malformed(f"is cut off: {count} values should follow byte {self._position}")


def _with_arrays(node: Any, data: mmap.mmap, directory: epath.PathLike, name: str) -> Any:
    """Replace the byte ranges of arrays in `node` by LazyArrays."""
    if isinstance(node, _Span):
        return _lazy([node], None, data, directory, name)
    if isinstance(node, list):
        return [_with_arrays(child, data, directory, name) for child in node]
    if not isinstance(node, dict):
        return node
    if _CHUNKED not in node:
        return {key: _with_arrays(child, data, directory, name) for key, child in node.items()}
    return _lazy(_in_order(node.get("chunks")), _in_order(node.get("shape")), data, directory, name)


def _in_order(numbered: Any) -> list[Any]:
    """Return the values of {"0": …, "1": …}, which is how Flax writes tuples."""
    if not isinstance(numbered, dict) or set(numbered) != {str(i) for i in range(len(numbered))}:
        raise _Malformed("has a chunked array without its shape and chunks")
    return [numbered[str(i)] for i in range(len(numbered))]


def _lazy(
    pieces: list[Any], shape: list[Any] | None, data: mmap.mmap, directory: epath.PathLike, name: str
) -> LazyArray:
    """Return an array whose elements are stored in consecutive `pieces`; `shape` None: that of the only piece."""
    contents = [_array_header(data, piece) for piece in pieces]
    if not contents or len({dtype for _, dtype, _ in contents}) != 1:
        raise _Malformed("has a chunked array without chunks, or with chunks of several dtypes")
    dtype = contents[0][1]
    try:
        shape = contents[0][0] if shape is None else check_shape(shape)
    except ValueError as error:
        raise _Malformed(f"has a chunked array of which {error}") from None
    spans = [span for _, _, span in contents]
    size, there = math.prod(shape) * dtype.itemsize, sum(span.end - span.start for span in spans)
    if size != there:
        raise _Malformed(f"has a {dtype} array of shape {list(shape)} with {there} bytes instead of {size}")
    return LazyArray(shape, dtype, lambda: _read(directory, name, spans, size).view(dtype).reshape(shape))


def _array_header(data: mmap.mmap, piece: Any) -> tuple[tuple[int, ...], np.dtype, _Span]:
    """Return shape, dtype and the byte range of the elements of an unchunked array."""
    if not isinstance(piece, _Span) or piece.code is None:
        raise _Malformed("has plain bytes, or something else, where an array belongs")
    content = _Parser(data, piece.start, piece.end).whole()
    if not isinstance(content, list) or len(content) != 3:
        raise _Malformed(f"has no array in its extension at byte {piece.start}")
    shape, dtype, elements = content
    try:
        shape = check_shape(shape)
    except ValueError as error:
        raise _Malformed(f"has an array at byte {piece.start} of which {error}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Malformed(f"has an array of dtype {str(dtype)[:40]!r} at byte {piece.start}; known: {', '.join(DTYPES)}")
    if not isinstance(elements, _Span) or elements.code is not None:
        raise _Malformed(f"has an array without elements at byte {piece.start}")
    size, there = math.prod(shape) * DTYPES[dtype].itemsize, elements.end - elements.start
    if size != there:
        raise _Malformed(f"has a {dtype} array of shape {list(shape)} with {there} bytes instead of {size}")
    return shape, DTYPES[dtype], elements


def _read(directory: epath.PathLike, name: str, spans: list[_Span], size: int) -> np.ndarray:
    """Return the concatenated bytes of `spans` as a uint8 array."""
    result = np.empty(size, np.uint8)
    done = 0
    try:
        with open_inside(directory, name) as file:
            for span in spans:
                file.seek(span.start)
                done += file.readinto(memoryview(result)[done : done + span.end - span.start])
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read: {error.strerror}") from error
    if done != size:
        raise DamagedCheckpoint(directory, f"{name} has become shorter since it was opened")
    return result
