"""Examples as bytes: msgpack, with numpy arrays as raw little-endian bytes. No pickle.

Values are restored with their exact types. Integer arrays are stored with as few bytes per number as possible.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np

from t5x._runtime.errors import UserError

Example = dict[str, Any]

# Codes of msgpack's extension types.
_VECTOR, _ARRAY, _OBJECTS, _SCALAR, _TUPLE, _LARGE = range(1, 7)
# One-dimensional arrays of these types start with two indices into this list: their own type and the stored one.
_COMMON = tuple(map(np.dtype, ("<i4", "<i8", "<u1", "<u2", "<u4", "<f4", "<f8", "?", "<i2", "<i1")))
_PLACES = {dtype: index for index, dtype in enumerate(_COMMON)}
_NARROW = tuple((np.iinfo(dtype).max, _PLACES[np.dtype(dtype)]) for dtype in ("<u1", "<u2"))


def encode(examples: list[Example]) -> bytes:
    """Return a list of examples as bytes; raise a UserError for values that cannot be stored."""
    try:
        return pack(examples)
    except _Impossible as error:
        name = next(name for example in examples for name, value in example.items() if not _is_possible(value))
        raise UserError(
            f"the field {name!r} contains {error}, which a cache cannot store. Convert it to text, numbers, lists or "
            "arrays in a preprocessor before CacheDatasetPlaceholder, or remove it."
        ) from error


def decode(content: bytes) -> Any:
    """Return what was passed to `encode` or `pack`; the arrays are not shared."""
    return msgpack.unpackb(
        content, ext_hook=_from_extension, strict_map_key=False, unicode_errors="surrogatepass", use_list=True
    )


@contextlib.contextmanager
def open_writer(path: str, options: str) -> Iterator[Callable[[list[Example]], int]]:
    """Yield a function that appends a list of examples to an array_record file and returns its size in bytes.

    Raises:
      OSError: the disk is full.
    """
    from array_record.python import array_record_module

    written = 0

    def write(examples: list[Example]) -> int:
        nonlocal written
        content = encode(examples)
        writer.write(content)
        written += 1
        return len(content)

    try:
        writer = array_record_module.ArrayRecordWriter(path, options)
        yield write
        writer.close()
        count = array_record_module.ArrayRecordReader(path).num_records()
        if count != written:
            raise RuntimeError(f"{path} has {count} of the {written} records that were written")
    except RuntimeError as error:
        if any(words in str(error) for words in ("No space left", "Disk quota")):  # there is no error code
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
        raise


class _Impossible(Exception):
    pass


def _is_possible(value: Any) -> bool:
    try:
        pack(value)
        return True
    except _Impossible:
        return False


def pack(value: Any) -> bytes:
    """Return a value as bytes: text, numbers, arrays, and lists, tuples and dicts of them."""
    return msgpack.packb(value, default=_extension, strict_types=True, unicode_errors="surrogatepass")


def _extension(value: Any) -> Any:
    """Convert a value that msgpack does not support to one that it does."""
    match value:
        case np.ndarray():
            return _from_array(value)
        case np.generic():
            return msgpack.ExtType(_SCALAR, pack([_name(value.dtype), value.tobytes()]))
        case tuple() if type(value) is tuple:
            return msgpack.ExtType(_TUPLE, pack(list(value)))
        case int():
            return msgpack.ExtType(_LARGE, str(int(value)).encode())
        case str():
            return str(value)
        case Mapping():
            return dict(value)
        case list():
            return list(value)
    raise _Impossible(f"a {type(value).__name__} ({str(value)[:40]})")


def _from_array(array: np.ndarray) -> msgpack.ExtType:
    if array.dtype.hasobject:
        if array.dtype != np.dtype(object):
            raise _Impossible(f"an array of {array.dtype}")
        return msgpack.ExtType(_OBJECTS, pack([list(array.shape), array.ravel().tolist()]))
    place = _PLACES.get(array.dtype)
    if array.ndim != 1 or place is None:
        return msgpack.ExtType(_ARRAY, pack([_name(array.dtype), list(array.shape), array.tobytes()]))
    stored = place
    if array.dtype.kind in "iu" and array.size and array.min() >= 0:
        largest = int(array.max())
        stored = next((narrow for limit, narrow in _NARROW if largest <= limit), place)
    return msgpack.ExtType(_VECTOR, bytes((place, stored)) + array.astype(_COMMON[stored], copy=False).tobytes())


def _from_extension(code: int, content: bytes) -> Any:
    if code == _VECTOR:
        stored = np.frombuffer(content, _COMMON[content[1]], offset=2)
        return stored.astype(_COMMON[content[0]])
    if code == _LARGE:
        return int(content)
    parts = decode(content)
    if code == _TUPLE:
        return tuple(parts)
    if code == _SCALAR:
        return np.frombuffer(parts[1], _dtype(parts[0]))[0]
    if code == _ARRAY:
        return np.frombuffer(parts[2], _dtype(parts[0])).reshape(parts[1]).copy()
    array = np.empty(len(parts[1]), object)
    array[:] = parts[1]
    return array.reshape(parts[0])


def _name(dtype: np.dtype) -> str:
    if np.dtype(dtype.str) != dtype:
        raise _Impossible(f"numbers of type {dtype}")
    return dtype.str


_dtype = functools.cache(np.dtype)
