"""A text that is longer than a model's input, in pieces that overlap."""

import itertools
import re
from collections.abc import Callable, Iterator

from t5x.answering.spans import Span

_WORD = re.compile(r"\S+\s*|\s+")
_WORDS_AT_LEAST = 4  # in a window: a word that takes more of it is divided


def windows(text: str, tokens: Callable[[str], int], room: int, overlap: int) -> list[Span]:
    """Pieces of a text, divided between words, of at most `room` tokens each; they cover all of it.

    Consecutive ones have `overlap` tokens in common, or a few more: as many whole words.

    >>> windows("one two three four", lambda piece: len(piece.split()), room=2, overlap=1)
    [Span(start=0, end=8), Span(start=4, end=14), Span(start=8, end=18)]

    Args:
      tokens: how many tokens a piece of the text has.
      overlap: less than `room`.
    """
    if tokens(text) <= room:
        return [Span(0, len(text))]
    words = list(_words(text, tokens, max(1, room // _WORDS_AT_LEAST)))
    before = [0, *itertools.accumulate(tokens(text[word.start : word.end]) for word in words)]
    found: list[Span] = []
    first = 0
    while True:
        last = first + 1  # excluded
        while last < len(words) and before[last + 1] - before[first] <= room:
            last += 1
        # Tokens of the whole may be more than those of its words, one by one.
        while last > first + 1 and tokens(text[words[first].start : words[last - 1].end]) > room:
            last -= 1
        found.append(Span(words[first].start, words[last - 1].end))
        if last == len(words):
            return found
        shared = last
        while shared > first + 1 and before[last] - before[shared] < overlap:
            shared -= 1
        first = shared


def _words(text: str, tokens: Callable[[str], int], limit: int) -> Iterator[Span]:
    """Words, each with the spaces behind it; those of more tokens than the limit in parts."""
    for match in _WORD.finditer(text):
        yield from _parts(text, Span(*match.span()), tokens, limit)


def _parts(text: str, span: Span, tokens: Callable[[str], int], limit: int) -> Iterator[Span]:
    start, end = span
    if end - start == 1 or tokens(text[start:end]) <= limit:
        yield span
        return
    middle = (start + end) // 2
    yield from _parts(text, Span(start, middle), tokens, limit)
    yield from _parts(text, Span(middle, end), tokens, limit)
