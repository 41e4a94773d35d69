"""Writes TensorFlow's checkpoint format, so that tests can make whole and hostile ones without TensorFlow."""

import math
import struct
from pathlib import Path

import numpy as np

from t5x.files.digests import masked_crc32c

CODES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bfloat16": 14, "float16": 19}
HEADER = b"\x08\x01\x1a\x02\x08\x01"  # one data file, version 1


def varint(value: int) -> bytes:
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*octets, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def entry(shape=(2,), code=1, shard=0, offset=0, size=None, crc=0) -> bytes:
    """A BundleEntryProto."""
    size = math.prod(shape) * 4 if size is None else size
    dimensions = b"".join(data(2, number(1, dimension)) for dimension in shape)
    fields = number(1, code), data(2, dimensions), number(3, shard), number(4, offset), number(5, size)
    return b"".join(fields) + varint(6 << 3 | 5) + struct.pack("<I", crc)


def pair(key: bytes, value: bytes, shared: int = 0) -> bytes:
    """An entry of a block that takes the first `shared` bytes of its key from the one before."""
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def block(content: bytes, restarts: int = 1, compression: int = 0) -> bytes:
    """A block with its trailer; `restarts` only claims to be their number. Compressed content is taken as it is."""
    if compression == 0:
        content += struct.pack("<II", 0, restarts)
    content += bytes([compression])
    return content + struct.pack("<I", masked_crc32c(content))


def handle(offset: int, size: int) -> bytes:
    return varint(offset) + varint(size)


def table(first_block: bytes, handles: list[bytes] | None = None) -> bytes:
    """A file of one block of entries, and of an index with these handles (by default: of that block)."""
    handles = [handle(0, len(first_block) - 5)] if handles is None else handles
    index = block(b"".join(pair(b"%05d" % i, value) for i, value in enumerate(handles)))
    footer = handle(0, 0) + handle(len(first_block), len(index) - 5)
    return first_block + index + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def index_file(entries: dict[bytes, bytes], header: bytes = HEADER) -> bytes:
    """The `.index` of these BundleEntryProtos."""
    pairs = [pair(b"", header), *(pair(key, value) for key, value in sorted(entries.items()))]
    return table(block(b"".join(pairs)))


def write_bundle(prefix: Path, variables: dict[str, np.ndarray]) -> None:
    """A whole checkpoint in one data file."""
    content, entries = b"", {}
    for name, array in variables.items():
        raw = array.tobytes()
        crc = masked_crc32c(raw)
        entries[name.encode()] = entry(array.shape, CODES[array.dtype.name], 0, len(content), len(raw), crc)
        content += raw
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".index").write_bytes(index_file(entries))
    prefix.with_name(prefix.name + ".data-00000-of-00001").write_bytes(content)
