"""Where in a text an answer stands.

A vocabulary gives an answer back in its normal form (NFKC, single spaces), T5's own training data had spaces around
punctuation, and what a vocabulary does not know comes back as U+2047. So the answer is looked for as it is, then in its
folded form: NFKC without capitals, any space where the answer has one, and spaces beside punctuation or none.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

_UNKNOWN = "\ufffd"  # as is U+2047 here, whose normal form is two question marks
_UNKNOWNS = 3  # in an answer, each of so many characters at most: with more, anything would do
_UNKNOWN_SIZE = 12
_PARTS = re.compile(rf"{_UNKNOWN}+|[^\W_]+|[^\s]")


def has_unknown(text: str) -> bool:
    """Whether a vocabulary had no piece for something in it."""
    return "\u2047" in text or _UNKNOWN in text


class Span(NamedTuple):
    """Characters `start` to `end` (excluded) of a text."""

    start: int
    end: int


def locate(answer: str, text: str, start: int = 0, end: int | None = None) -> Span | None:
    """The first place of an answer in text[start:end], in offsets of the whole text; None where there is none.

    Whole words win over parts of words, then the text as it is over its folded form.

    >>> locate("eiffel tower", "In Paris, the Eiffel\\xa0Tower")
    Span(start=14, end=26)
    """
    end = len(text) if end is None else end
    answer = answer.strip()
    if not answer:
        return None
    exact = [Span(m.start(), m.end()) for m in re.compile(re.escape(answer)).finditer(text, start, end)]
    if whole := _first_whole(exact, text):
        return whole
    folded = list(_folded_matches(answer, text, start, end))
    return _first_whole(folded, text) or next(iter([*exact, *folded]), None)


def _first_whole(spans: list[Span], text: str) -> Span | None:
    return next((span for span in spans if _is_whole(span, text)), None)


def _is_whole(span: Span, text: str) -> bool:
    """Whether no word goes on over its ends."""
    joined = lambda at: 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()
    return not joined(span.start) and not joined(span.end)


def _folded_matches(answer: str, text: str, start: int, end: int) -> Iterator[Span]:
    parts = _PARTS.findall(_fold(answer.replace("\u2047", _UNKNOWN)))
    if not parts or sum(part[0] == _UNKNOWN for part in parts) > _UNKNOWNS or set("".join(parts)) == {_UNKNOWN}:
        return
    pattern = ""
    for before, part in zip(["", *parts], parts, strict=False):
        words = before[-1:].isalnum() and part[0].isalnum()
        pattern += "" if not before else r"\s+" if words else r"\s*"
        pattern += rf"\S{{1,{_UNKNOWN_SIZE}}}?" if part[0] == _UNKNOWN else re.escape(part)
    folded, places = _with_places(text, start, end)
    divided = lambda at: 0 < at < len(places) and places[at - 1] == places[at]  # in the middle of a character
    for match in re.compile(pattern).finditer(folded):
        if not divided(match.start()) and not divided(match.end()):
            yield Span(places[match.start()].start, places[match.end() - 1].end)


def _with_places(text: str, start: int, end: int) -> tuple[str, list[Span]]:
    """The folded form of text[start:end], and the characters that each of its characters was made of."""
    folded, places = [], []
    for span in _clusters(text, start, end):
        made = _fold(text[span.start : span.end])
        folded.append(made)
        places += [span] * len(made)
    return "".join(folded), places


def _clusters(text: str, start: int, end: int) -> Iterator[Span]:
    """Pieces of a text whose normal forms, one after the other, are that of the whole."""
    first = start
    for at in range(start + 1, end):
        if text[at].isascii():  # it is not changed by what is before it
            separate = True
        else:
            before, after = _nfkc(text[first:at]), _nfkc(text[at])
            separate = not unicodedata.combining(after[0]) and _nfkc(text[first : at + 1]) == before + after
        if separate:
            yield Span(first, at)
            first = at
    if first < end:
        yield Span(first, end)


def _nfkc(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def _fold(text: str) -> str:
    made = _nfkc(text).casefold()
    return made if made.isascii() else "".join(c for c in made if unicodedata.category(c) != "Cf")
