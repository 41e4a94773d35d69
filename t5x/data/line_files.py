"""Random access to the lines of one file by an index of byte offsets."""

import numpy as np

from t5x.data.local_files import LocalFile
from t5x.data.staging import LocalCopy
from t5x.errors import UserError

_BOM = b"\xef\xbb\xbf"
_LINE_END, _RETURN = b"\n\r"


class LineFile:
    """The lines of a file, indexed when opened: 8 bytes of memory a line. A byte order mark is left out.

    Args:
      copy: the file.
      skip: lines to leave out at the beginning.
      skip_blank: leave out empty lines.
      quote: a character inside whose pairs a line end does not end the line, as in CSV.
    """

    def __init__(self, copy: LocalCopy, *, skip: int = 0, skip_blank: bool = False, quote: str | None = None):
        self.name = copy.name
        self._file = LocalFile(copy)
        self._skip_blank = skip_blank
        # From each start to the next one: the line, and the empty lines that were left out behind it.
        self._offsets = self._file.offsets(
            f"lines 1 {skip} {skip_blank} {quote}", lambda: self._index(skip, skip_blank, quote)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        """Line `index`, without its line end."""
        content = self._file.read(int(self._offsets[index]), int(self._offsets[index + 1]))
        if self._skip_blank:
            return content.rstrip(b"\r\n")
        return content.removesuffix(b"\n").removesuffix(b"\r")

    def line_number(self, index: int) -> int:
        """The number, from 1, of the line of the file in which line `index` begins."""
        return 1 + self._count_line_ends(int(self._offsets[index]))

    def take_first(self) -> bytes:
        """The first line, which is then no longer one of the lines."""
        first = self[0]
        self._offsets = self._offsets[1:]
        return first

    def _index(self, skip: int, skip_blank: bool, quote: str | None) -> np.ndarray:
        """Offsets at which lines begin, and the size of the file: int64 [lines + 1]."""
        file = self._file
        found: list[np.ndarray] = []
        base = quotes = before = 0  # where the chunk begins; quotes so far, modulo 2; the byte before the chunk
        start = len(_BOM) if file.read(0, min(len(_BOM), file.size)) == _BOM else 0
        for chunk in file.chunks():
            content = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(content == _LINE_END)
            if quote is not None:
                # Only the parity matters, which survives the overflow of 8 bits.
                inside = (quotes + np.cumsum(content == ord(quote), dtype=np.uint8)) & 1
                ends = ends[inside[ends] == 0]
                quotes = int(inside[-1])
            if ends.size:
                starts = np.concatenate([[start - base], ends[:-1] + 1])
                start = base + int(ends[-1]) + 1
                skipped = min(skip, ends.size)
                skip -= skipped
                starts, ends = starts[skipped:], ends[skipped:]
                if skip_blank:
                    starts = starts[~_are_blank(content, starts, ends, before)]
                found.append(starts + base)
            base += len(chunk)
            before = chunk[-1]
        if quotes:
            raise UserError(
                f"{self.name}: a quote {quote} in or after line {1 + self._count_line_ends(start)} is never closed. "
                "Close it. Where quotes are plain characters of the text, write the data as .tsv or .jsonl, or read it "
                "with quote=None in a task of your own."
            )
        rest = file.read(start, min(start + 2, file.size))
        if rest and not skip and not (skip_blank and rest == b"\r"):
            found.append(np.array([start]))
        return np.concatenate([*found, [file.size]]).astype(np.int64)

    def _count_line_ends(self, end: int) -> int:
        return sum(chunk.count(b"\n") for chunk in self._file.chunks(end))


def _are_blank(content: np.ndarray, starts: np.ndarray, ends: np.ndarray, before: int) -> np.ndarray:
    """Which lines are empty or hold only a carriage return; `before` is the byte before `content`."""
    blank = ends == starts
    single = np.flatnonzero(ends == starts + 1)
    octets = content[starts[single]]
    if single.size and starts[single[0]] < 0:
        octets[0] = before
    blank[single] = octets == _RETURN
    return blank
