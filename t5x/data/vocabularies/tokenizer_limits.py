"""Limits for untrusted tokenizers: how long tokenization may take, and how much longer it may make a text.

A tokenizer.json can contain arbitrary regular expressions and replacements. A short one with `(a+)+$` takes forever,
and one that doubles every "a" forty times runs out of memory.
"""

import base64
import binascii
import math
import re
from collections.abc import Iterator
from typing import Any

MAX_TOKEN_LENGTH = 1024
_MAX_REPLACEMENT = 1024  # bytes; the longest in NFKC (U+FDFA) has 33
_MAX_GROWTH = 10_000
_FEW = 16  # repeats that take negligible time
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(?:(,)(\d*))?\})")
_GROUP = re.compile(r"\((?:\?(?:[imx-]*:|[=!>]|<[=!]|<\w+>))?")
_FLAGS = re.compile(r"\(\?[im-]+\)")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^}]*\}|[^1-9kg])", re.DOTALL)


def check_tokenizer(described: dict[str, Any]) -> None:
    """Raise ValueError if a tokenizer.json could take exponential time or expand a text excessively."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(_steps(described.get(part)))
        growth = math.prod(map(_growth, steps))
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {part} could make a text {growth:.3g} times as long")
        for step in steps:
            if isinstance(pattern := step.get("pattern"), dict) and "Regex" in pattern:
                check_pattern(pattern["Regex"])


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every component of a normalizer or the like, including nested ones."""
    if isinstance(part, dict):
        yield part
        for child in part.values():
            yield from _steps(child)
    elif isinstance(part, list):
        for child in part:
            yield from _steps(child)


def _growth(step: dict[str, Any]) -> float:
    """Return the largest factor by which a component can lengthen a text."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": pattern}:
            replaced = pattern.get("String") if isinstance(pattern, dict) else None
            if replaced:
                return max(1.0, len(content.encode(errors="replace")) / len(replaced.encode(errors="replace")))
            return 1.0 + len(content.encode(errors="replace"))  # a regular expression may match empty strings
        case {"type": "ByteLevel"}:
            return 2.0  # a byte becomes a character of up to two bytes
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return check_charsmap(_decoded(charsmap))
    return 1.0


def _decoded(charsmap: str) -> bytes:
    try:
        return base64.b64decode(charsmap)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its precompiled_charsmap is not base64: {error}") from None


def check_charsmap(charsmap: bytes) -> int:
    """Return the longest replacement's length in SentencePiece's compiled rules; raise ValueError if it is too long.

    The rules are the size of a trie (4 bytes), the trie, and the replacements, each of which ends with a zero byte.
    """
    longest = max(map(len, charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")))
    if longest > _MAX_REPLACEMENT:
        raise ValueError(f"its normaliser replaces a character by {longest:,} bytes")
    return max(1, longest)


def check_pattern(pattern: str) -> None:
    r"""Raise ValueError for a regular expression that could take more than quadratic time.

    Rejects repeated groups that can match a text in several ways, two unbounded repeats before something that may
    not match (`\w*\w*\d`), and constructs that no tokenizer needs, such as back-references.

    >>> check_pattern(r"\s*[\r\n]+|\s+(?!\S)|\s+")
    >>> check_pattern(r"(a+)+$")
    Traceback (most recent call last):
    ValueError: its regular expression '(a+)+$' repeats a group that has repeats or alternatives inside
    """

    def refuse(reason: str) -> ValueError:
        return ValueError(f"its regular expression {pattern[:80]!r} {reason}")

    groups = [_Group()]
    at = 0
    while at < len(pattern):
        inner = None
        if flags := _FLAGS.match(pattern, at):
            at = flags.end()
            continue
        if pattern[at] == "(":
            if not (opened := _GROUP.match(pattern, at)) or pattern.startswith("?", opened.end()):
                raise refuse(f"has an unusual group at character {at}")
            groups.append(_Group())
            at = opened.end()
            continue
        if pattern[at] == "|":
            groups[-1].next_alternative()
            at += 1
            continue
        if pattern[at] == ")" and len(groups) > 1:
            inner = groups.pop()
            at += 1
        elif pattern[at] == "[":
            at = _class_end(pattern, at)
        elif pattern[at] == "\\":
            if not (escape := _ESCAPE.match(pattern, at)):
                raise refuse("refers back to a group")
            at = escape.end()
        else:
            at += 1
        least = most = 1.0
        if quantifier := _QUANTIFIER.match(pattern, at):
            least, most = _bounds(quantifier)
            at = quantifier.end()
            at += pattern.startswith(("?", "+"), at) and not quantifier[0].endswith("}")  # lazy, or possessive
            if _QUANTIFIER.match(pattern, at):
                raise refuse("repeats a repeat")
        if inner and most > 1 and inner.is_ambiguous:
            raise refuse("repeats a group that has repeats or alternatives inside")
        groups[-1].add(least, most, inner)
        if groups[-1].tried_again > 1:
            raise refuse("has several unbounded repeats before something that may not match")


class _Group:
    """The state of a group while its pattern is read.

    Attributes:
      is_ambiguous: it can match a text in several ways.
      tried_again: number of unbounded repeats that backtrack through every length if what follows does not match: the
        degree of the time this takes. -1 if nothing in it can fail to match.
    """

    def __init__(self):
        self.is_ambiguous = False
        self.tried_again = -1
        self._repeats = 0  # unbounded repeats in this alternative
        self._most_repeats = 0  # over all alternatives

    def next_alternative(self) -> None:
        self._repeats, self.is_ambiguous = 0, True

    def add(self, least: float, most: float, inner: "_Group | None") -> None:
        """Add an element, possibly a group, that is repeated `least` to `most` times."""
        if inner is not None and inner.tried_again >= 0:
            before = self._repeats if least else 0  # optional elements cause no backtracking
            self.tried_again = max(self.tried_again, before + inner.tried_again)
        elif least:
            self.tried_again = max(self.tried_again, self._repeats)
        self._repeats += (most > _FEW) + (inner._most_repeats if inner else 0)
        self._most_repeats = max(self._most_repeats, self._repeats)
        self.is_ambiguous |= least != most or (inner is not None and inner.is_ambiguous)


def _bounds(quantifier: re.Match) -> tuple[float, float]:
    """Return the least and the greatest number of repeats."""
    if quantifier[0] in ("*", "+", "?"):
        return {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}[quantifier[0]]
    low, comma, high = quantifier.groups()
    least = float(low[:9] or 0)
    return least, (float(high[:9]) if high else math.inf) if comma else least


def _class_end(pattern: str, at: int) -> int:
    """Return the end of the character class that starts at `at`; classes may be nested."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # a leading ] is literal
        elif pattern[at] == "]":
            depth -= 1
        at += 1
        if depth == 0:
            break
    return at
