"""TensorFlow's V2 checkpoints, read without TensorFlow.

    PREFIX.index                     a sorted table: name -> position of the tensor, a protocol buffer
    PREFIX.data-SSSSS-of-NNNNN       the tensors, raw, little-endian

The index is read at once and every entry is checked against the sizes of the data files. A tensor is memory-mapped and
its checksum verified when it is read.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats.safety import Malformed, check_links
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.digests import masked_crc32c
from t5x.files.untrusted import open_regular

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
_TRAILER = 5
_MAX_KEY = 1024
_MAX_BLOCK = 16 * 2**20  # TensorFlow writes blocks of 256 kB
_MAX_ENTRIES = 100_000
_UNCOMPRESSED, _SNAPPY = 0, 1


def read_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the (key, value) pairs of a table in key order.

    Raises:
      Malformed: `content` is not a table, or is damaged.
    """
    if len(content) < _FOOTER:
        raise Malformed(f"it has {len(content)} bytes, fewer than the footer of a table")
    if not content.endswith(_MAGIC):
        raise Malformed("it does not end with the magic number of a table (truncated, or another kind of file)")
    footer = Cursor(content[-_FOOTER : -len(_MAGIC)])
    _ = footer.varint(), footer.varint()  # skip the metaindex: filters, which TensorFlow does not write
    index = _read_block(content, footer.varint(), footer.varint())

    last_key, end, count = None, 0, 0
    for _, handle in _entries(index):
        cursor = Cursor(handle)
        offset, size = cursor.varint(), cursor.varint()
        if offset < end:
            raise Malformed(f"the block at byte {offset} overlaps the one before it")
        end = offset + size + _TRAILER
        for key, value in _entries(_read_block(content, offset, size)):
            if last_key is not None and key <= last_key:
                raise Malformed(f"the keys are not in order ({key!r} after {last_key!r})")
            last_key = key
            count += 1
            if count > _MAX_ENTRIES:
                raise Malformed(f"it has more than {_MAX_ENTRIES} entries")
            yield key, value


class Cursor:
    """Reads numbers and bytes from the front of a buffer; raises Malformed if it ends too early."""

    def __init__(self, data: bytes):
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        """Return whether there are unread bytes."""
        return self._position < len(self._data)

    def take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise Malformed(f"a length of {size} bytes exceeds the {len(self._data)} bytes it is in")
        piece = self._data[self._position : end]
        self._position = end
        return piece

    def little_endian(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        """Read a number of seven bits per byte, lowest first; all bytes but the last have the high bit set."""
        value = 0
        for shift in range(0, 64, 7):
            octet = self.take(1)[0]
            value |= (octet & 0x7F) << shift
            if octet < 0x80:
                return value
        raise Malformed("a variable-length number does not end")


def _read_block(content: bytes, offset: int, size: int) -> bytes:
    if offset + size + _TRAILER > len(content) - _FOOTER:
        raise Malformed(f"a block of {size} bytes at byte {offset} exceeds the {len(content)} bytes of the file")
    end = offset + size + 1
    if masked_crc32c(content[offset:end]) != int.from_bytes(content[end : end + 4], "little"):
        raise Malformed(f"the checksum of the block at byte {offset} does not match")
    compression = content[end - 1]
    if compression == _UNCOMPRESSED:
        return content[offset : end - 1]
    if compression == _SNAPPY:  # as in the indexes of Google's published checkpoints
        return decompress_snappy(content[offset : end - 1])
    raise Malformed(f"the block at byte {offset} has compression {compression}, which is neither none nor snappy")


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    if len(block) < 4 or end < 0:
        raise Malformed(f"a block of {len(block)} bytes cannot hold {restarts} restart offsets")
    cursor = Cursor(block[:end])
    key = b""
    while cursor:
        shared, added, size = cursor.varint(), cursor.varint(), cursor.varint()
        if shared > len(key) or shared + added > _MAX_KEY:
            raise Malformed(f"a key shares {shared} bytes with a key of {len(key)} and adds {added}")
        key = key[:shared] + cursor.take(added)
        yield key, cursor.take(size)


def decompress_snappy(data: bytes) -> bytes:
    """Decompress Snappy's raw format: the length, then literals and copies of earlier output."""
    cursor = Cursor(data)
    length = cursor.varint()
    if length > _MAX_BLOCK:
        raise Malformed(f"compressed data claims to hold {length} bytes")
    output = bytearray()
    while cursor:
        tag = cursor.take(1)[0]
        kind, upper = tag & 3, tag >> 2
        if kind == 0:
            size = (upper if upper < 60 else cursor.little_endian(upper - 59)) + 1
            output += cursor.take(size)
        else:
            if kind == 1:
                size, distance = (upper & 7) + 4, (upper >> 3) << 8 | cursor.take(1)[0]
            else:
                size, distance = upper + 1, cursor.little_endian(2 if kind == 2 else 4)
            if not 0 < distance <= len(output):
                raise Malformed(f"compressed data copies from {distance} bytes back, after {len(output)} bytes")
            start = len(output) - distance
            repeated = output[start : start + size]
            output += (repeated * (size // len(repeated) + 1))[:size]
        if len(output) > length:
            break
    if len(output) != length:
        raise Malformed(f"compressed data gives {len(output)} bytes or more instead of {length}")
    return bytes(output)


_DTYPES = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 14: ml_dtypes.bfloat16, 19: np.float16}
_OTHER_DTYPES = {4: "uint8", 6: "int8", 7: "string", 10: "bool", 20: "resource", 21: "variant"}
_MAX_INDEX_BYTES = 16 * 2**20  # a T5 11B's index is below 200 kB
_MAX_RANK = 16
_VERSION = 1


class _Unsupported(Exception):
    """The checkpoint is valid, but this reader does not support it."""


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """The position of a tensor: `size` bytes at `offset` of the data file number `shard`. `crc` is masked."""

    dtype: np.dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Index:
    num_shards: int
    entries: Mapping[str, TensorEntry]


def read_bundle(prefix: epath.PathLike) -> dict[str, LazyArray]:
    """Open the checkpoint `prefix`.index, `prefix`.data-*.

    Returns:
      its tensors by name. Reading one verifies its checksum (DamagedCheckpoint on mismatch) and returns a read-only
      array over the memory-mapped file.

    Raises:
      UserError: it is damaged, a data file is missing or too short, or something in it is not supported.
    """
    index = read_index(f"{prefix}.index")
    paths, sizes, arrays = {}, {}, {}
    for shard in {entry.shard for entry in index.entries.values()}:
        paths[shard] = f"{prefix}.data-{shard:05d}-of-{index.num_shards:05d}"
        sizes[shard] = _check_file(paths[shard])
    for name, entry in index.entries.items():
        path, end = paths[entry.shard], entry.offset + entry.size
        if end > sizes[entry.shard]:
            raise DamagedCheckpoint(path, f"it has {sizes[entry.shard]} bytes, but {name} ends at byte {end}")
        arrays[name] = LazyArray(entry.shape, entry.dtype, functools.partial(_read_tensor, path, name, entry))
    return arrays


def read_index(path: str) -> Index:
    """Read a `.index` file.

    Raises:
      UserError: it is missing, damaged, or lists something unsupported (partitioned variables, strings).
    """
    size = _check_file(path)
    if size > _MAX_INDEX_BYTES:
        raise DamagedCheckpoint(path, f"it has {size} bytes; the index of a checkpoint has at most {_MAX_INDEX_BYTES}")
    try:
        with open_regular(path) as file:
            return _parse_index(file.read(size))
    except Malformed as error:
        raise DamagedCheckpoint(path, str(error)) from error
    except _Unsupported as error:
        raise UserError(f"{path}: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _parse_index(content: bytes) -> Index:
    pairs = read_table(content)
    key, header = next(pairs, (None, b""))
    if key != b"":
        raise Malformed("it does not begin with the header of a checkpoint")
    num_shards = _parse_header(header)
    entries = {}
    slices = False
    for key, value in pairs:
        if key.startswith(b"\0"):
            slices = True  # slices of a partitioned variable, whose own entry follows
            continue
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise Malformed(f"the name {key!r} is not text") from None
        try:
            entries[name] = _parse_entry(value, num_shards)
        except (Malformed, _Unsupported) as error:
            raise type(error)(f"variable {name!r} {error}") from error
    if slices:
        raise Malformed("it has slices of a variable that it does not list")
    _check_overlaps(entries)
    return Index(num_shards, entries)


def _parse_header(data: bytes) -> int:
    """Return the number of data files."""
    fields = _parse_message(data)
    num_shards = _number(fields, 1)
    if not 0 < num_shards < 2**31:
        raise Malformed(f"it names {num_shards} data files")
    if _number(fields, 2) != 0:
        raise _Unsupported("the checkpoint was written on a big-endian machine, which is not supported.")
    if (needed := _number(_parse_message(_data(fields, 3)), 2)) > _VERSION:
        raise _Unsupported(f"the checkpoint needs a reader of version {needed}; this one has version {_VERSION}.")
    return num_shards


def _parse_entry(data: bytes, num_shards: int) -> TensorEntry:
    fields = _parse_message(data)
    if 7 in fields:
        raise _Unsupported(
            "is stored in slices (a partitioned variable), which is not supported. Load the checkpoint with "
            "TensorFlow and save it again with the variable as one piece."
        )
    code = _number(fields, 1)
    if code not in _DTYPES:
        raise _Unsupported(
            f"has the type {_OTHER_DTYPES.get(code, f'number {code}')}; only float32, float64, float16, bfloat16, "
            "int32 and int64 are supported. Is this a checkpoint of a T5 model?"
        )
    dtype = np.dtype(_DTYPES[code])
    shape = _parse_shape(_data(fields, 2))
    shard, offset, size = (_number(fields, number) for number in (3, 4, 5))
    if shard >= num_shards:
        raise Malformed(f"claims to be in data file number {shard}, of {num_shards} numbered from 0")
    if size != math.prod(shape) * dtype.itemsize:
        raise Malformed(f"takes {size} bytes, which is not the size of {dtype.name}{list(shape)}")
    return TensorEntry(dtype, shape, shard, offset, size, _number(fields, 6))


def _parse_shape(data: bytes) -> tuple[int, ...]:
    fields = _parse_message(data)
    if _number(fields, 3):
        raise Malformed("is of unknown shape")
    shape = tuple(_number(_parse_message(dimension), 1) for dimension in _all_data(fields, 2))
    if len(shape) > _MAX_RANK or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise Malformed(f"has the impossible shape {list(shape[: _MAX_RANK + 1])}")
    return shape


def _check_overlaps(entries: Mapping[str, TensorEntry]) -> None:
    shard = end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].shard, item[1].offset, item[1].size)):
        if entry.shard == shard and entry.offset < end:
            raise Malformed(f"variable {name!r} overlaps another one in data file number {shard}")
        shard, end = entry.shard, entry.offset + entry.size


# Protocol buffers: a message is a sequence of (field number << 3 | wire type, content).


def _parse_message(data: bytes) -> dict[int, list[int | bytes]]:
    """Return the values of each field, by field number."""
    cursor = Cursor(data)
    fields: dict[int, list[int | bytes]] = {}
    while cursor:
        number, wire_type = divmod(cursor.varint(), 8)
        if wire_type == 0:
            value: int | bytes = cursor.varint()
        elif wire_type == 2:
            value = cursor.take(cursor.varint())
        elif wire_type in (1, 5):
            value = cursor.little_endian(8 if wire_type == 1 else 4)
        else:
            raise Malformed(f"field {number} of a message has the unknown wire type {wire_type}")
        fields.setdefault(number, []).append(value)
    return fields


def _number(fields: Mapping[int, list[int | bytes]], number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise Malformed(f"field {number} of a message is not a number")
    return value


def _data(fields: Mapping[int, list[int | bytes]], number: int) -> bytes:
    return b"".join(_all_data(fields, number))  # repeated parts of a message merge by concatenation


def _all_data(fields: Mapping[int, list[int | bytes]], number: int) -> list[bytes]:
    values = [value for value in fields.get(number, []) if isinstance(value, bytes)]
    if len(values) < len(fields.get(number, [])):
        raise Malformed(f"field {number} of a message is not a message")
    return values


# Files.


def _check_file(path: str) -> int:
    """Return the size of a file of the checkpoint, after checking that it is a regular file inside its directory."""
    directory, name = os.path.split(path)
    check_links(directory, [name], [os.path.realpath(directory)])
    if not os.path.exists(path):
        raise UserError(f"{path} is missing. Copy all files of the checkpoint (.index and every .data-*) together.")
    if not os.path.isfile(path):
        raise DamagedCheckpoint(path, "it is not a regular file")
    return os.path.getsize(path)


def _read_tensor(path: str, name: str, entry: TensorEntry) -> np.ndarray:
    try:
        data = np.memmap(path, np.uint8, mode="r", offset=entry.offset, shape=(entry.size,)) if entry.size else b""
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Has it changed since the checkpoint was opened?") from error
    if masked_crc32c(data) != entry.crc:  # type: ignore[arg-type]
        raise DamagedCheckpoint(path, f"the checksum of {name} does not match")
    array = np.frombuffer(data, np.uint8).view(entry.dtype).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()
