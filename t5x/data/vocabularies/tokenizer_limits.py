"""Limits for untrusted tokenizers: how much longer tokenization may make its input.

A tokenizer.json can contain arbitrary replacements. One that doubles every "a" forty times runs out of memory. Its
regular expressions are not checked: one like `(a+)+$` can take forever.
"""

import base64
import binascii
import math
from collections.abc import Iterator
from typing import Any

MAX_TOKEN_LENGTH = 1024
_MAX_REPLACEMENT = 1024  # bytes; the longest in NFKC (U+FDFA) has 33
_MAX_GROWTH = 10_000


def check_tokenizer(described: dict[str, Any]) -> None:
    """Raise ValueError if a tokenizer.json could expand its input excessively."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = math.prod(map(_growth, _steps(described.get(part))))
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {part} could make its input {growth:.3g} times as long")


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
    """Return the largest factor by which a component can lengthen its input."""
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
