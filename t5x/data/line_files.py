"""Random access to the lines of one file by an index of byte offsets."""

import logging
import os
import weakref
from collections.abc import Iterator

import numpy as np

from t5x.data import files
from t5x.errors import UserError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 24
_BOM = b"\xef\xbb\xbf"


class LineFile:
    """The lines of a file, indexed when opened. A byte order mark at the beginning is left out.

    An uncompressed local file stays on disk; a .gz or remote one is read into memory.

    Args:
      path: the file.
      keep_open: hold it open between reads; False opens it for each read (for splits of very many files).
      skip: lines to leave out at the beginning.
      skip_blank: leave out empty lines.
      quote: a character inside whose pairs a line end does not end the line, as in CSV.
    """

    def __init__(
        self,
        path: str,
        keep_open: bool = True,
        *,
        skip: int = 0,
        skip_blank: bool = False,
        quote: str | None = None,
    ):
        self.path = path
        self._content = _into_memory(path)
        self._descriptor = None
        if self._content is None and keep_open:
            self._descriptor = _open(path)
            weakref.finalize(self, os.close, self._descriptor)
        offsets = self._index(quote)[skip:]
        self._starts, self._ends = offsets[:-1], offsets[1:]
        if skip_blank and (blank := self._blank(offsets)).any():
            self._starts, self._ends = self._starts[~blank], self._ends[~blank]

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, index: int) -> bytes:
        """Line `index`, without its line end."""
        content = self._read(int(self._starts[index]), int(self._ends[index]))
        return content.removesuffix(b"\n").removesuffix(b"\r")

    def line_number(self, index: int) -> int:
        """The number, from 1, of the line of the file in which line `index` begins."""
        return 1 + sum(chunk.count(b"\n") for chunk in self._chunks(int(self._starts[index])))

    def take_first(self) -> bytes:
        """The first line, which is then no longer one of the lines."""
        first = self.line(0)
        self._starts, self._ends = self._starts[1:], self._ends[1:]
        return first

    def _index(self, quote: str | None) -> np.ndarray:
        """Offsets at which lines begin, and the end of the last one: int64 [lines + 1]."""
        found = [np.zeros(1, np.int64)]
        size = quotes = 0
        for chunk in self._chunks():
            content = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(content == ord("\n"))
            if quote is not None:
                # Only the parity matters, which survives the overflow of 8 bits.
                inside = (quotes + np.cumsum(content == ord(quote), dtype=np.uint8)) & 1
                ends = ends[inside[ends] == 0]
                quotes = int(inside[-1])
            found.append(ends + (size + 1))
            size += len(chunk)
        offsets = np.concatenate(found)
        if offsets[-1] != size:
            offsets = np.append(offsets, size)
        if quotes:
            line = 1 + sum(chunk.count(b"\n") for chunk in self._chunks(int(offsets[-2])))
            raise UserError(
                f"{self.path}: a quote {quote} in or after line {line} is never closed. Close it, or, where quotes "
                "are plain characters of the text, read the file with quote=None."
            )
        if self._read(0, min(len(_BOM), size)) == _BOM:
            offsets[0] = len(_BOM)
        return offsets

    def _blank(self, offsets: np.ndarray) -> np.ndarray:
        lengths = np.diff(offsets)
        blank = lengths <= 1
        short = np.flatnonzero(blank | (lengths == 2))
        for i in short:
            blank[i] = not self._read(int(offsets[i]), int(offsets[i + 1])).strip(b"\r\n")
        return blank

    def _chunks(self, end: int | None = None) -> Iterator[bytes]:
        """The content up to `end`, a piece at a time."""
        if self._content is not None:
            for start in range(0, len(self._content) if end is None else end, _CHUNK):
                yield self._content[start : min(start + _CHUNK, len(self._content) if end is None else end)]
            return
        with open(_open(self.path), "rb") as file:
            while chunk := file.read(_CHUNK if end is None else min(_CHUNK, end - file.tell())):
                yield chunk

    def _read(self, start: int, end: int) -> bytes:
        if self._content is not None:
            return self._content[start:end]
        descriptor = self._descriptor if self._descriptor is not None else _open(self.path)
        try:
            content = os.pread(descriptor, end - start, start)
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        if len(content) != end - start:
            raise UserError(f"{self.path} has become shorter while it was in use. Do not change data under a run.")
        return content


def _into_memory(path: str) -> bytes | None:
    """The content of a file that has no cheap random access; None for one that has."""
    if path.endswith(".gz"):
        content = files.read_gzip(path)
    elif files.is_remote(path):
        content = files.read_bytes(path)
    else:
        return None
    logger.info("%s: read into memory (%.1f MB)", path, len(content) / 1e6)
    return content


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
