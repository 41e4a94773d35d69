"""Text for a terminal of a given width: headings, fields, bars and tables. Control characters are escaped."""

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_INDENT = 10
_LINES = 4  # shown of a long text
_BINS = 12
_SEGMENTS = "123456789abcdefghijklmnopqrstuvwxyz"


def escaped(value: Any) -> str:
    r"""Return a value as text, with control, format and other unprintable characters escaped.

    >>> print(escaped("a\tb\x1b[1m"))
    a\tb\x1b[1m
    """
    text = value if isinstance(value, str) else str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def width_of(text: str) -> int:
    """Return the number of columns of a printable text: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    wide = lambda c: 2 if unicodedata.east_asian_width(c) in "WF" else 1
    return sum(0 if unicodedata.combining(c) else wide(c) for c in text)


def cut(text: str, width: int) -> str:
    """Return `text`, truncated with … if it takes more than `width` columns."""
    if width_of(text) <= width:
        return text
    kept = text[:width]
    while width_of(kept) > width - 1:
        kept = kept[:-1]
    return kept + "…"


class Page:
    """Formats lines of at most `width` columns.

    Args:
      bold: mark headings, for terminals.
    """

    def __init__(self, width: int = 80, bold: bool = False):
        self.width = width
        self._bold = bold

    def bold(self, text: str) -> str:
        text = cut(text, self.width)
        return f"\x1b[1m{text}\x1b[0m" if self._bold else text

    def heading(self, text: str) -> str:
        return self.bold(escaped(text))

    def rule(self, text: str) -> str:
        text = cut(escaped(text), self.width - 5)
        return self.bold(f"-- {text} {'-' * (self.width - width_of(text) - 4)}")

    def step(self, name: str, note: str) -> str:
        return cut(f"{self.bold(escaped(name))}{':' if note else ''} {note}".rstrip(), self.width + 8 * self._bold)

    def cut(self, text: str) -> str:
        return cut(text, self.width)

    def field(self, name: str, text: str) -> str:
        """Return one line: a name and its description."""
        return cut(f"  {_padded(escaped(name))}{text}", self.width)

    def wrapped(self, text: str) -> list[str]:
        """Return the whole text, wrapped."""
        return [f"  {line}" for line in _lines(text, self.width - 2)]

    def paragraph(self, name: str, text: str) -> list[str]:
        """Return a long text after its name, truncated after a few lines."""
        lines = _lines(text or "(empty)", self.width - _INDENT - 2)
        if len(lines) > _LINES:
            size = f" ({len(text):,} characters)"
            last = cut(lines[_LINES - 1] + " …", self.width - _INDENT - 2 - len(size))
            lines = [*lines[: _LINES - 1], last + size]
        head = _padded(escaped(name))
        first = "" if len(head) > _INDENT else head
        made = [] if first else [cut(f"  {head}".rstrip(), self.width)]
        for line in lines:
            made.append(f"  {first or ' ' * _INDENT}{line}")
            first = ""
        return made

    def items(self, items: Sequence[str], lines: int) -> list[str]:
        """Return as many leading items as fit on `lines` lines, and the last two."""
        room = self.width - _INDENT - 2
        made = [""]
        for at, item in enumerate(items):
            tail = f" … {' '.join(items[-2:])}" if len(made) == lines and at < len(items) - 2 else ""
            if made[-1] and width_of(made[-1]) + 1 + width_of(item) + width_of(tail) > room:
                if len(made) == lines:
                    rest = f" … {' '.join(items[-2:])}" if at < len(items) - 2 else " " + " ".join(items[at:])
                    made[-1] += rest
                    break
                made.append("")
            made[-1] += f" {item}" if made[-1] else item
        return [cut(f"  {' ' * _INDENT}{line}", self.width) for line in made]

    def strip(self, segments: np.ndarray) -> str:
        """Draw a row: the segment number at each position, a dot for padding."""
        width = min(len(segments), self.width - _INDENT - 4)
        at = (np.arange(width) * len(segments)) // max(1, width)
        return "".join("." if not s else _SEGMENTS[(s - 1) % len(_SEGMENTS)] for s in segments[at].tolist())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; the first column is left-aligned, the others right-aligned."""
    rows = [tuple(map(escaped, row)) for row in (heads, *rows)]
    widths = [max(width_of(row[i]) for row in rows) for i in range(len(heads))]
    for row in rows:
        cells = [cell + " " * (w - width_of(cell)) if i == 0 else " " * (w - width_of(cell)) + cell
                 for i, (cell, w) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield "  " + "  ".join(cells).rstrip()


def histogram(numbers: np.ndarray, width: int) -> Iterator[str]:
    """Yield a bar for each range of numbers; outliers share the last bar."""
    top = int(np.percentile(numbers, 99, method="inverted_cdf"))
    step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if (top + 1) / (s * 10**e) <= _BINS)
    low = int(numbers.min()) // step * step
    starts = list(range(low, top + 1, step))
    edges = [*starts, max(starts[-1] + step, int(numbers.max()) + 1)]
    counts, _ = np.histogram(numbers, edges)
    labels = [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges)]
    left, right = max(map(len, labels)), len(f"{counts.max():,}")
    room = width - left - right - 7
    for label, count in zip(labels, counts.tolist(), strict=True):
        bar = "#" * max(bool(count), round(room * count / counts.max()))
        yield f"  {label:>{left}} |{bar:<{room}} {count:>{right},}"


def _padded(name: str) -> str:
    return f"{name:<{_INDENT}}" if len(name) < _INDENT else f"{name} "


def _lines(text: str, width: int) -> list[str]:
    """Wrap text to lines, at spaces if there is one in the second half of a line."""
    lines = []
    while width_of(text) > width:
        line = text[:width]
        while width_of(line) > width:
            line = line[:-1]
        space = line.rfind(" ")
        line = line[: space + 1] if space > width // 2 else line
        lines.append(line.rstrip())
        text = text[len(line) :]
    return [*lines, text]
