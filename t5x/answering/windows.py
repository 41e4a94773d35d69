"""Split a text that is longer than a model's input into overlapping windows."""

import itertools
import re
from collections.abc import Callable, Iterator

from t5x.answering.spans import Span

_WORD = re.compile(r"\S+\s*|\s+")
_WORDS_AT_LEAST = 4  # per window; longer words are split


def windows(text: str, tokens: Callable[[str], int], room: int, overlap: int) -> list[Span]:
    """Return windows of at most `room` tokens, split between words, that cover the whole text.

    Consecutive windows share whole words of at least `overlap` tokens.

    >>> windows("one two three four", lambda piece: len(piece.split()), room=2, overlap=1)
    [Span(start=0, end=8), Span(start=4, end=14), Span(start=8, end=18)]

    Args:
      tokens: returns the number of tokens of a piece of the text.
      overlap: must be below `room`.
    """
    if tokens(text) <= room:
        return [Span(0, len(text))]
    limit = max(1, room // _WORDS_AT_LEAST)
    words = [part for word in _WORD.finditer(text) for part in _split_word(text, Span(*word.span()), tokens, limit)]
    before = [0, *itertools.accumulate(tokens(text[word.start : word.end]) for word in words)]
    spans: list[Span] = []
    first = 0
    while True:
        last = first + 1  # excluded
        while last < len(words) and before[last + 1] - before[first] <= room:
            last += 1
        # A window may have more tokens than its words separately.
        while last > first + 1 and tokens(text[words[first].start : words[last - 1].end]) > room:
            last -= 1
        spans.append(Span(words[first].start, words[last - 1].end))
        if last == len(words):
            return spans
        shared = last
        while shared > first + 1 and before[last] - before[shared] < overlap:
            shared -= 1
        first = shared


def _split_word(text: str, span: Span, tokens: Callable[[str], int], limit: int) -> Iterator[Span]:
    """Yield a word with the spaces after it, in pieces if it has more tokens than the limit."""
    start, end = span
    if end - start == 1 or tokens(text[start:end]) <= limit:
        yield span
        return
    middle = (start + end) // 2
    yield from _split_word(text, Span(start, middle), tokens, limit)
    yield from _split_word(text, Span(middle, end), tokens, limit)
