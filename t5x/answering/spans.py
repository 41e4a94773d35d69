"""The position of an answer in a context.

Decoded answers differ from the context: vocabularies normalise text (NFKC, single spaces), T5's training data had
spaces around punctuation, and unknown characters become U+2047. So the answer is first searched verbatim, then in
folded form: NFKC, case-folded, with any whitespace for a space, and optional whitespace beside punctuation. U+2047
matches only characters that the vocabulary does not know.
"""

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
    given_back: Callable[[str], str] = lambda text: text,
) -> Span | None:
    """Return the first position of an answer in text[start:end], as offsets in the whole text, or None.

    Matches of whole words win over parts of words, then verbatim matches over folded ones. An answer with unknown
    characters is found only where the vocabulary would produce it from the text, and only if no other words of the text
    match.

    >>> locate("eiffel tower", "In Paris, the Eiffel\\xa0Tower")
    Span(start=14, end=26)

    Args:
      given_back: encodes and decodes a text with the vocabulary of the answer.
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
    """Return the folded form without spaces."""
    return "".join(_fold(text.replace("\u2047", _UNKNOWN)).split())


def _first_whole(spans: list[Span], text: str) -> Span | None:
    return next((span for span in spans if _is_whole(span, text)), None)


def _is_whole(span: Span, text: str) -> bool:
    """Return whether the span does not start or end inside a word."""
    joined = lambda at: 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()
    return not joined(span.start) and not joined(span.end)


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
    folded, places = _with_places(text, start, end)
    divided = lambda at: 0 < at < len(places) and places[at - 1] == places[at]  # inside a character
    for match in re.compile(f"(?=({pattern}))").finditer(folded):  # matches may overlap
        if not divided(match.start(1)) and not divided(match.end(1)):
            yield Span(places[match.start(1)].start, places[match.end(1) - 1].end)


def _with_places(text: str, start: int, end: int) -> tuple[str, list[Span]]:
    """Return the folded form of text[start:end], and for each of its characters the span it was made from."""
    folded, places = [], []
    for span in _clusters(text, start, end):
        made = _fold(text[span.start : span.end])
        folded.append(made)
        places += [span] * len(made)
    return "".join(folded), places


def _clusters(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield pieces of a text whose normal forms, concatenated, are the normal form of the whole."""
    first = start
    for at in range(start + 1, end):
        if text[at].isascii():  # normalised independently of what precedes it
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
