"""The position of an answer in a context.

Decoded answers differ from the context: vocabularies normalise text (NFKC, single spaces), T5's training data had
spaces around punctuation, and unknown characters become U+2047. So the answer is first searched verbatim, then in
folded form: NFKC, case-folded, with any whitespace for a space, and optional whitespace beside punctuation. U+2047
matches only characters that the vocabulary does not know.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

_UNKNOWN = "\ufffd"  # also used for U+2047, whose normal form is two question marks
_PARTS = re.compile(rf"{_UNKNOWN}+|[^\W_]+|[^\s]")


def has_unknown(text: str) -> bool:
    """Return whether the text has characters that a vocabulary did not know."""
    return "\u2047" in text or _UNKNOWN in text


class Span(NamedTuple):
    """Characters `start` to `end` (excluded) of a text."""

    start: int
    end: int


def locate(
    answer: str,
    text: str,
    start: int = 0,
    end: int | None = None,
    round_trip: Callable[[str], str] = lambda text: text,
) -> Span | None:
    """Return the first position of an answer in text[start:end], as offsets in the whole text, or None.

    Matches of whole words win over parts of words, then verbatim matches over folded ones. An answer with unknown
    characters is found only where the vocabulary would produce it from the text, and only if no other words of the text
    match.

    >>> locate("eiffel tower", "In Paris, the Eiffel\\xa0Tower")
    Span(start=14, end=26)

    Args:
      round_trip: encodes and decodes a string with the vocabulary of the answer.
    """
    end = len(text) if end is None else end
    answer = answer.strip()
    if not answer:
        return None
    if has_unknown(answer):
        return _locate_unknown(answer, text, start, end, round_trip)
    exact = list(_exact_matches(answer, text, start, end))
    if whole := _first_whole(exact, text):
        return whole
    folded = list(_folded_matches(answer, text, start, end))
    return _first_whole(folded, text) or next(iter([*exact, *folded]), None)


def _locate_unknown(answer: str, text: str, start: int, end: int, round_trip: Callable[[str], str]) -> Span | None:
    characters = {c for c in _nfkc(text[start:end]) if not c.isspace()}
    unknown = {folded for c in characters if has_unknown(round_trip(c)) for folded in _fold(c)}
    spans = [
        span
        for span in _folded_matches(answer, text, start, end, unknown)
        if _bare(round_trip(text[slice(*span)])) == _bare(answer)
    ]
    spans = [span for span in spans if _is_whole(span, text)] or spans
    return spans[0] if len({_bare(text[slice(*span)]) for span in spans}) == 1 else None


def _bare(text: str) -> str:
    """Return the folded form without spaces."""
    return "".join(_fold(text.replace("\u2047", _UNKNOWN)).split())


def _first_whole(spans: list[Span], text: str) -> Span | None:
    return next((span for span in spans if _is_whole(span, text)), None)


def _is_whole(span: Span, text: str) -> bool:
    """Return whether the span does not start or end inside a word."""

    def is_inside_word(offset: int) -> bool:
        return 0 < offset < len(text) and text[offset - 1].isalnum() and text[offset].isalnum()

    return not is_inside_word(span.start) and not is_inside_word(span.end)


def _exact_matches(answer: str, text: str, start: int, end: int) -> Iterator[Span]:
    while (start := text.find(answer, start, end)) >= 0:
        yield Span(start, start + len(answer))
        start += 1


def _folded_matches(answer: str, text: str, start: int, end: int, unknown: Set[str] = frozenset()) -> Iterator[Span]:
    """Yield the positions of the folded form.

    Args:
      unknown: folded characters; a maximal run of them matches unknown characters in the answer.
    """
    parts = _PARTS.findall(_fold(answer.replace("\u2047", _UNKNOWN)))
    # An answer of unknown characters alone would match anywhere.
    if set("".join(parts)) <= {_UNKNOWN} or (has_unknown(answer) and not unknown):
        return
    run = f"[{re.escape(''.join(sorted(unknown)))}]"
    pattern = f"(?<!{run})" if parts[0][0] == _UNKNOWN else ""
    for before, part in zip(["", *parts], parts, strict=False):
        words = before[-1:].isalnum() and part[0].isalnum()
        pattern += "" if not before else r"\s+" if words else r"\s*"
        pattern += f"{run}++" if part[0] == _UNKNOWN else re.escape(part)
    folded, origins = _fold_with_origins(text, start, end)

    def is_inside_character(offset: int) -> bool:
        return 0 < offset < len(origins) and origins[offset - 1] == origins[offset]

    for match in re.compile(f"(?=({pattern}))").finditer(folded):  # matches may overlap
        if not is_inside_character(match.start(1)) and not is_inside_character(match.end(1)):
            yield Span(origins[match.start(1)].start, origins[match.end(1) - 1].end)


def _fold_with_origins(text: str, start: int, end: int) -> tuple[str, list[Span]]:
    """Return the folded form of text[start:end], and the span from which each of its characters comes."""
    folded, origins = [], []
    for span in _clusters(text, start, end):
        piece = _fold(text[span.start : span.end])
        folded.append(piece)
        origins += [span] * len(piece)
    return "".join(folded), origins


def _clusters(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield pieces of a text whose normal forms, concatenated, are the normal form of the whole."""
    first = start
    for index in range(start + 1, end):
        if text[index].isascii():  # normalised independently of the characters before it
            is_separate = True
        else:
            before, after = _nfkc(text[first:index]), _nfkc(text[index])
            is_separate = not unicodedata.combining(after[0]) and _nfkc(text[first : index + 1]) == before + after
        if is_separate:
            yield Span(first, index)
            first = index
    if first < end:
        yield Span(first, end)


def _nfkc(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def _fold(text: str) -> str:
    folded = _nfkc(text).casefold()
    return folded if folded.isascii() else "".join(c for c in folded if unicodedata.category(c) != "Cf")


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
