"""Text for a terminal of a given width: headings, fields, bars and tables. Control characters are escaped."""

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_INDENT = 10
_PARAGRAPH_LINES = 4
_BINS = 12


def escape(value: Any) -> str:
    r"""Return a value as text, with control, format and other unprintable characters escaped.

    >>> print(escape("a\tb\x1b[1m"))
    a\tb\x1b[1m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def width_of(text: str) -> int:
    """Return the number of columns of a printable text: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def clip(text: str, width: int) -> str:
    """Return `text`, truncated with … if it takes more than `width` columns."""
    return text if width_of(text) <= width else wrap(text, width - 1, at_spaces=False)[0] + "…"


def wrap(text: str, width: int, at_spaces: bool = True) -> list[str]:
    """Wrap text to lines, at spaces if there is one in the second half of a line."""
    lines = []
    while width_of(text) > width:
        line = text[: max(1, width)]
        while width_of(line) > width and len(line) > 1:
            line = line[:-1]
        space = line.rfind(" ")
        if at_spaces and space > width // 2:
            line = line[: space + 1]
        lines.append(line.rstrip())
        text = text[len(line) :]
    return [*lines, text]


class TextPage:
    """Writes lines of at most `width` columns.

    Args:
      bold: print headings in bold, for terminals.
      write: called with each line.
    """

    def __init__(self, width: int = 80, bold: bool = False, write: Callable[[str], Any] = print):
        self.width = width
        self._bold = bold
        self._write = write

    def line(self, text: str = "", bold: bool = False) -> None:
        text = clip(escape(text), self.width).rstrip()
        self._write(f"\x1b[1m{text}\x1b[0m" if bold and self._bold else text)

    def section(self, title: str) -> None:
        title = clip(escape(title), self.width - 5)
        self.line()
        self.line(f"-- {title} {'-' * (self.width - width_of(title) - 4)}", bold=True)

    def field(self, name: str, text: str) -> None:
        """Write one line: a name and its description."""
        self.line(f"  {escape(name):<{_INDENT - 1}} {text}")

    def wrapped(self, text: str) -> None:
        for line in wrap(escape(text), self.width - 2):
            self.line(f"  {line}")

    def paragraph(self, name: str, text: str) -> None:
        """Write a long text after its name, truncated after a few lines."""
        room = self.width - _INDENT - 2
        lines = wrap(escape(text) or "(empty)", room)
        if len(lines) > _PARAGRAPH_LINES:
            size = f" ({len(text):,} characters)"
            last = clip(lines[_PARAGRAPH_LINES - 1] + " …", room - len(size))
            lines[_PARAGRAPH_LINES - 1 :] = [last + size]
        if len(name) >= _INDENT:
            self.line(f"  {name}")
            name = ""
        for label, line in itertools.zip_longest([name], lines, fillvalue=""):
            self.field(label, line)

    def items(self, items: Sequence[str], lines: int) -> None:
        """Write as many leading items as fit on `lines` lines, and the last two."""
        room = self.width - _INDENT - 2
        items = [escape(item) for item in items]
        wrapped = wrap(" ".join(items), room)
        if len(wrapped) > lines:
            tail = f" … {' '.join(items[-2:])}"
            wrapped[lines - 1 :] = [wrap(wrapped[lines - 1], room - width_of(tail))[0] + tail]
        for line in wrapped:
            self.field("", line)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the first column is left-aligned, the others right-aligned."""
        rows = [[escape(cell) for cell in row] for row in (heads, *rows)]
        widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            gaps = [" " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=True)]
            cells = [row[0] + gaps[0], *(gap + cell for cell, gap in zip(row[1:], gaps[1:], strict=True))]
            self.line("  " + "  ".join(cells))

    def histogram(self, numbers: np.ndarray) -> None:
        """Write a bar for each range of numbers; outliers share the last bar."""
        top = int(np.percentile(numbers, 99, method="inverted_cdf"))
        step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if (top + 1) / (s * 10**e) <= _BINS)
        starts = list(range(int(numbers.min()) // step * step, top + 1, step))
        edges = [*starts, max(starts[-1] + step, int(numbers.max()) + 1)]
        counts, _ = np.histogram(numbers, edges)
        labels = [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges)]
        left, right = max(map(len, labels)), len(f"{counts.max():,}")
        room = self.width - left - right - 7
        for label, count in zip(labels, counts.tolist(), strict=True):
            bar = "#" * max(bool(count), round(room * count / counts.max()))
            self.line(f"  {label:>{left}} |{bar:<{room}} {count:>{right},}")
