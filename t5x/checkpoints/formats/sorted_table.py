"""LevelDB's sorted key-value table, as TensorFlow writes its `.index` files.

    blocks of entries … | (metaindex block, unused) | index block: (last key, handle) of each | footer, 48 bytes
    block:    entries, restart offsets (4 bytes each), their number | compression, 1 byte | masked CRC-32C, 4 bytes
    entry:    shared, added, size of value (varints), the added bytes of the key, value; the first `shared` bytes of
              the key are those of the key before
    footer:   handles of metaindex and index (offset, size: varints), padding, magic

The content is untrusted: every length is checked before use, and keys and the number of entries are bounded.
"""

from collections.abc import Iterator

from t5x.checkpoints.formats.safety import Malformed
from t5x.files.digests import masked_crc32c

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
_TRAILER = 5
_MAX_KEY = 1024
_MAX_ENTRIES = 100_000
_UNCOMPRESSED = 0


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
    if (compression := content[end - 1]) != _UNCOMPRESSED:
        raise Malformed(
            f"the block at byte {offset} has compression {compression}, which is not supported. TensorFlow 1.2 and "
            "later write indexes without compression: load the checkpoint with TensorFlow and save it uncompressed"
        )
    return content[offset : end - 1]


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
