"""Lazy reader of Flax's msgpack files: the structure is parsed once, arrays stay in the file until they are read.

The file is untrusted input. Nesting, strings and the number of values are limited, and only plain values and Flax's
arrays are accepted. The format has no checksum.
"""

import math
import mmap
from collections.abc import Callable
from typing import Any, BinaryIO

import msgpack
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
_MAX_STRING_BYTES = 2**16
_MAX_ARRAY_HEADER_BYTES = 1024

# First byte of a value. An extension's content starts after its header, whose last byte is the extension type.
_MAPS = (*range(0x80, 0x90), 0xDE, 0xDF)
_LISTS = (*range(0x90, 0xA0), 0xDC, 0xDD)
_STRINGS = (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB)
_BYTES_HEADER = {0xC4: 2, 0xC5: 3, 0xC6: 5}
_EXTENSION_HEADER = {0xC7: 3, 0xC8: 4, 0xC9: 6} | dict.fromkeys(range(0xD4, 0xD9), 2)


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
                return _Parser(directory, name, file, data).read_dictionary()
        except (ValueError, IndexError, msgpack.UnpackException) as error:
            problem = str(error) or type(error).__name__
            raise DamagedCheckpoint(directory, f"{name} is not a msgpack file of Flax: {problem}") from error


def flatten(tree: dict[str, Any], is_leaf: Callable[[dict[str, Any]], bool] = lambda node: False) -> dict[str, Any]:
    """Return {names of all levels joined by `/`: leaf}, with numbers as zero-dimensional arrays and without None.

    Args:
      is_leaf: whether a dictionary is itself a leaf.
    """
    leaves: dict[str, Any] = {}
    for key, node in tree.items():
        if isinstance(node, dict) and not is_leaf(node):
            leaves |= {f"{key}/{name}": leaf for name, leaf in flatten(node, is_leaf).items()}
        elif isinstance(node, int | float):
            is_int32 = type(node) is int and -(2**31) <= node < 2**31
            leaves[key] = LazyArray.from_array(np.asarray(node, np.int32 if is_int32 else None))
        elif node is not None:
            leaves[key] = node
    return leaves


def is_tree(path: epath.PathLike) -> bool:
    """Return whether the file starts like a msgpack file of Flax: with a dictionary whose first key is a string.

    Raises:
      OSError: it cannot be opened.
    """
    with open_regular(path) as file:
        start = file.read(6)
    key = start[{0xDE: 3, 0xDF: 5}.get(start[0], 1) :] if start else b""
    return bool(key) and start[0] in _MAPS and start[0] != 0x80 and key[0] in _STRINGS


class _Parser:
    """Walks the file with msgpack's Unpacker, which reads it, and looks ahead in `data`, the same file."""

    def __init__(self, directory: epath.PathLike, name: str, file: BinaryIO, data: mmap.mmap):
        self._directory, self._name, self._data = directory, name, data
        self._unpacker = msgpack.Unpacker(file, max_buffer_size=0, max_str_len=_MAX_STRING_BYTES)
        self._values = 0

    def read_dictionary(self) -> dict[str, Any]:
        tree = self._read(0)
        if not isinstance(tree, dict):
            raise ValueError("it is not a dictionary")
        if self._unpacker.tell() != len(self._data):
            raise ValueError(f"it continues after its end, at byte {self._unpacker.tell()}")
        return tree

    def _read(self, depth: int) -> Any:
        self._values += 1
        if self._values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise ValueError(f"it has more than {_MAX_VALUES} values, or is nested more than {_MAX_DEPTH} deep")
        position = self._unpacker.tell()
        tag = self._data[position]
        if tag in _MAPS:
            return self._read_map(depth)
        if tag in _LISTS:
            return [self._read(depth + 1) for _ in range(self._unpacker.read_array_header())]
        if tag in _BYTES_HEADER:
            raise ValueError(f"there are plain bytes at byte {position}, where an array belongs")
        if tag not in _EXTENSION_HEADER:
            return self._unpacker.unpack()
        self._unpacker.skip()
        return self._array(position + _EXTENSION_HEADER[tag], self._unpacker.tell())

    def _read_map(self, depth: int) -> Any:
        result = {}
        for _ in range(self._unpacker.read_map_header()):
            position = self._unpacker.tell()
            key = self._read(depth + 1)
            if not isinstance(key, str) or "/" in key or not paths.is_plain_relative(key):
                raise ValueError(f"the key at byte {position} is not the name of a parameter")
            if key in result:
                raise ValueError(f"the key {key!r} occurs twice")
            result[key] = self._read(depth + 1)
        if _CHUNKED in result:
            return _join(_in_order(result.get("chunks")), check_shape(_in_order(result.get("shape"))))
        return result

    def _array(self, start: int, end: int) -> LazyArray:
        """Return the array in the extension between two bytes: (shape, name of the dtype, elements)."""
        if self._data[start - 1] not in (ARRAY, SCALAR):
            raise ValueError(f"the extension at byte {start} has the unknown type {self._data[start - 1]}")
        header = msgpack.Unpacker()
        header.feed(self._data[start : min(end, start + _MAX_ARRAY_HEADER_BYTES)])
        if header.read_array_header() != 3:
            raise ValueError(f"the extension at byte {start} is not an array")
        shape, name = check_shape(header.unpack()), header.unpack()
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"the array at byte {start} has dtype {str(name)[:40]!r}; supported: {', '.join(DTYPES)}")
        bytes_at = start + header.tell()
        elements = bytes_at + _BYTES_HEADER.get(self._data[bytes_at], 0)
        size = math.prod(shape) * DTYPES[name].itemsize
        stated = int.from_bytes(self._data[bytes_at + 1 : elements], "big")
        if elements == bytes_at or not size == stated == end - elements:
            raise ValueError(
                f"the array at byte {start}, {name} {list(shape)}, has {end - elements} bytes instead of {size}"
            )
        arguments = (self._directory, self._name, elements, shape, DTYPES[name])
        return LazyArray(shape, DTYPES[name], lambda: _read_array(*arguments))


def _read_array(
    directory: epath.PathLike, name: str, start: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    try:
        with open_inside(directory, name) as file:
            elements = np.fromfile(file, dtype, math.prod(shape), offset=start)
        return elements.reshape(shape)
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpoint(directory, f"{name} has become shorter since it was opened") from error


def _in_order(numbered: Any) -> list[Any]:
    """Return the values of {"0": …, "1": …}, which is how Flax writes tuples."""
    if not isinstance(numbered, dict) or set(numbered) != {str(i) for i in range(len(numbered))}:
        raise ValueError("a chunked array lacks its shape or chunks")
    return [numbered[str(i)] for i in range(len(numbered))]


def _join(chunks: list[Any], shape: tuple[int, ...]) -> LazyArray:
    """Return the array whose elements are stored in consecutive chunks."""
    if not all(isinstance(chunk, LazyArray) for chunk in chunks) or len({chunk.dtype for chunk in chunks}) != 1:
        raise ValueError("a chunked array has no chunks, or chunks of several dtypes")
    if (size := math.prod(shape)) != (stored := sum(chunk.size for chunk in chunks)):
        raise ValueError(f"a chunked array of shape {list(shape)} has {stored} elements instead of {size}")

    def read() -> np.ndarray:
        result, done = np.empty(size, chunks[0].dtype), 0
        for chunk in chunks:
            result[done : done + chunk.size] = chunk.read().reshape(-1)
            done += chunk.size
        return result.reshape(shape)

    return LazyArray(shape, chunks[0].dtype, read)
