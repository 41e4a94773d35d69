"""Random access to the lines of one file with an index of byte offsets."""

import numpy as np

from t5x.errors import UserError
from t5x.files.local_copies import LocalCopy
from t5x.files.random_access import LocalFile

_BOM = b"\xef\xbb\xbf"
_LINE_END = ord("\n")


class LineFile:
    """The lines of a file, indexed when opened with 8 bytes of memory per line. A byte order mark is skipped.

    Args:
      copy: the file.
      skip: number of lines to skip at the start.
      blank: skip lines that are empty or consist only of these characters; None skips none.
      quote: quote character; line ends inside quotes do not end the line, as in CSV.
    """

    def __init__(self, copy: LocalCopy, *, skip: int = 0, blank: bytes | None = None, quote: str | None = None):
        self.name = copy.name
        self._file = LocalFile(copy)
        self._blank = blank
        # A range between two offsets holds a line and the skipped blank lines after it.
        self._offsets = self._file.offsets(f"lines 2 {skip} {blank!r} {quote}", lambda: self._index(skip, quote))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        """Return line `index`, without its line end."""
        start, end = self._offsets[index : index + 2].tolist()
        content = self._file.read(start, end)
        if self._blank is not None:
            return content.rstrip(self._blank + b"\n")
        return content.removesuffix(b"\n").removesuffix(b"\r")

    def line_number(self, index: int) -> int:
        """Return the number, from 1, of the line in the file where line `index` starts."""
        return 1 + self._count_line_ends(int(self._offsets[index]))

    def take_first(self) -> bytes:
        """Remove and return the first line."""
        first = self[0]
        self._offsets = self._offsets[1:]
        return first

    def _index(self, skip: int, quote: str | None) -> np.ndarray:
        """Return the offsets at which lines start, and the size of the file, int64 [lines + 1]."""
        file = self._file
        index: list[np.ndarray] = []
        base = quotes = 0  # start of the chunk; number of quotes so far, modulo 2
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
                starts, ends = starts[skipped:] + base, ends[skipped:] + base
                if self._blank is not None:
                    starts = starts[~self._are_blank(content, self._blank, base, starts, ends)]
                index.append(starts)
            base += len(chunk)
        if quotes:
            raise UserError(
                f"{self.name}: a quote {quote} in or after line {1 + self._count_line_ends(start)} is never closed. "
                "Close it. If quotes are ordinary characters, write the data as .tsv or .jsonl, or define a "
                "task that reads it with quote=None."
            )
        if start < file.size and not skip and not (self._blank and self._is_blank(start, file.size)):
            index.append(np.array([start]))
        return np.concatenate([*index, [file.size]]).astype(np.int64)

    def _count_line_ends(self, end: int) -> int:
        return sum(chunk.count(b"\n") for chunk in self._file.chunks(end))

    def _are_blank(
        self, content: np.ndarray, characters: bytes, base: int, starts: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Return which lines between `starts` and `ends` are blank; `content` starts at `base` in the file."""
        blank = ends == starts
        # The first character rules out most lines; it is not available if the line started in an earlier chunk.
        first = content[np.maximum(starts - base, 0)]
        suspects = np.isin(first, np.frombuffer(characters, np.uint8)) | (starts < base)
        for index in np.flatnonzero(suspects & ~blank):
            blank[index] = self._is_blank(int(starts[index]), int(ends[index]))
        return blank

    def _is_blank(self, start: int, end: int) -> bool:
        first = self._file.read(start, min(start + 1, end))
        return not first.strip(self._blank) and not self._file.read(start, end).strip(self._blank)
