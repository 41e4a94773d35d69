"""Where in a text an answer stands.

A vocabulary gives an answer back in its normal form (NFKC, single spaces), T5's own training data had spaces around
punctuation, and what a vocabulary does not know comes back as U+2047. So the answer is looked for as it is, then in its
folded form: NFKC without capitals, any space where the answer has one, and spaces beside punctuation or none. In the
place of U+2047 only what the vocabulary does not know may stand.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

_UNKNOWN = "\ufffd"  # as is U+2047 here, whose normal form is two question marks
_PARTS = re.compile(rf"{_UNKNOWN}+|[^\W_]+|[^\s]")


def has_unknown(text: str) -> bool:
    """Whether a vocabulary had no piece for something in it."""
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
    given_back: Callable[[str], str] = lambda text: text,
) -> Span | None:
    """The first place of an answer in text[start:end], in offsets of the whole text; None where there is none.

    Whole words win over parts of words, then the text as it is over its folded form. An answer with something unknown
    has a place only where the vocabulary would make that answer of it, and of no other words of the text.

    >>> locate("eiffel tower", "In Paris, the Eiffel\\xa0Tower")
    Span(start=14, end=26)

    Args:
      given_back: what the vocabulary of the answer makes of a text, encoded and decoded.
    """
    end = len(text) if end is None else end
    answer = answer.strip()
    if not answer:
        return None
    if has_unknown(answer):
        return _locate_unknown(answer, text, start, end, given_back)
    exact = list(_exact_matches(answer, text, start, end))
    if whole := _first_whole(exact, text):
        return whole
    folded = list(_folded_matches(answer, text, start, end))
    return _first_whole(folded, text) or next(iter([*exact, *folded]), None)


def _locate_unknown(answer: str, text: str, start: int, end: int, given_back: Callable[[str], str]) -> Span | None:
    characters = {c for c in _nfkc(text[start:end]) if not c.isspace()}
    unknown = {folded for c in characters if has_unknown(given_back(c)) for folded in _fold(c)}
    spans = [
        span
        for span in _folded_matches(answer, text, start, end, unknown)
        if _bare(given_back(text[slice(*span)])) == _bare(answer)
    ]
    spans = [span for span in spans if _is_whole(span, text)] or spans
    return spans[0] if len({_bare(text[slice(*span)]) for span in spans}) == 1 else None


def _bare(text: str) -> str:
    """Its folded form without spaces."""
    return "".join(_fold(text.replace("\u2047", _UNKNOWN)).split())


def _first_whole(spans: list[Span], text: str) -> Span | None:
    return next((span for span in spans if _is_whole(span, text)), None)


def _is_whole(span: Span, text: str) -> bool:
    """Whether no word goes on over its ends."""
    joined = lambda at: 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()
    return not joined(span.start) and not joined(span.end)


def _exact_matches(answer: str, text: str, start: int, end: int) -> Iterator[Span]:
    while (start := text.find(answer, start, end)) >= 0:
        yield Span(start, start + len(answer))
        start += 1


def _folded_matches(answer: str, text: str, start: int, end: int, unknown: Set[str] = frozenset()) -> Iterator[Span]:
    """Places of the folded form.

    Args:
      unknown: folded characters, of which whole runs stand for what is unknown in the answer.
    """
    parts = _PARTS.findall(_fold(answer.replace("\u2047", _UNKNOWN)))
    # Of nothing but unknown characters, any would do.
    if set("".join(parts)) <= {_UNKNOWN} or (has_unknown(answer) and not unknown):
        return
    run = f"[{re.escape(''.join(sorted(unknown)))}]"
    pattern = f"(?<!{run})" if parts[0][0] == _UNKNOWN else ""
    for before, part in zip(["", *parts], parts, strict=False):
        words = before[-1:].isalnum() and part[0].isalnum()
        pattern += "" if not before else r"\s+" if words else r"\s*"
        pattern += f"{run}++" if part[0] == _UNKNOWN else re.escape(part)
    folded, places = _with_places(text, start, end)
    divided = lambda at: 0 < at < len(places) and places[at - 1] == places[at]  # in the middle of a character
    for match in re.compile(f"(?=({pattern}))").finditer(folded):  # a place may overlap the one before it
        if not divided(match.start(1)) and not divided(match.end(1)):
            yield Span(places[match.start(1)].start, places[match.end(1) - 1].end)


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
