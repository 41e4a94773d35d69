"""Inputs that Python programs pass to a model: strings, or objects with the fields of its data."""

from collections.abc import Iterable, Mapping
from typing import Any

from t5x.data.data_description import DataDescription, field_names, fill
from t5x.errors import UserError, shorten


def read_inputs(inputs: Any, data: DataDescription | None = None) -> tuple[list[str], bool]:
    """Return the strings of a string, an object with fields, or a list of these; and whether it was only one.

    Args:
      data: makes the string of an object.

    Raises:
      UserError: there is anything else.
    """
    if isinstance(inputs, str | Mapping):
        return read_inputs([inputs], data)[0], True
    data = data or DataDescription()
    expected = f"a string, or an object with {', '.join(map(repr, field_names(data.inputs)))}"
    if isinstance(inputs, bytes) or not isinstance(inputs, Iterable):
        raise UserError(f"The input is {shorten(inputs)}: pass {expected}, or a list of these.")
    texts = []
    for i, each in enumerate(inputs):
        try:
            text = data.prefix + fill(data.inputs, each) if isinstance(each, Mapping) else each
        except (KeyError, UserError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"Input {i} is {shorten(each)}: it must be {expected}.")
        texts.append(text)
    return texts, False


def read_pairs(pairs: Any) -> tuple[list[tuple[str, str]], bool]:
    """Return the (input, target) of a list, or of a single pair; and whether it was only one.

    Raises:
      UserError: there is anything else.
    """
    is_single = isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
    pairs = [pairs] if is_single else pairs
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise UserError(f"score got {shorten(pairs)}: pass a list of (input, target), both strings.")
    pairs = list(pairs)
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f"Pair {i} is {shorten(pair)}: it must be (input, target), both strings.")
    return pairs, is_single


def encode_text(vocabulary: Any, text: str, limit: int | None, *, eos: bool) -> tuple[list[int], int]:
    """Return the ids of a string, truncated to `limit` with EOS kept, and their number before truncation."""
    end = [vocabulary.eos_id] if eos else []
    ids = [*vocabulary.encode(text), *end]
    if limit is None or len(ids) <= limit:
        return ids, len(ids)
    return [*ids[: limit - len(end)], *end], len(ids)
