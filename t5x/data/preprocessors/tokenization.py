"""From text to token ids: renaming fields, tokenizing, EOS. Each takes one example and returns one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.pipeline import Feature

Example = dict[str, Any]


def rekey(example: Example, key_map: Mapping[str, str | None] | None = None) -> Example:
    """Select and rename fields by `key_map`, {new name: old name}; an old name of None or "" gives an empty text.

    >>> rekey({"de": "Hallo", "en": "Hello"}, {"inputs": "en", "targets": "de"})
    {'inputs': 'Hello', 'targets': 'Hallo'}
    """
    if not key_map:
        return example
    return {new: example[old] if old else "" for new, old in key_map.items()}


def tokenize(
    example: Example,
    output_features: Mapping[str, Feature],
    copy_pretokenized: bool = True,
    with_eos: bool = False,
) -> Example:
    """Encode the output features with their vocabularies; a list of texts becomes a list of id arrays.

    Args:
      example: has text in its output features. Other fields are kept.
      output_features: features of the task.
      copy_pretokenized: keep the text as `<feature>_pretokenized`.
      with_eos: append EOS if the feature has `add_eos`; for a list, to the last text.
    """
    rekeyed = {}
    for name, value in example.items():
        feature = output_features.get(name)
        if feature is not None:
            if copy_pretokenized:
                rekeyed[f"{name}_pretokenized"] = value
            value = _encode(value, name, feature)
            if with_eos and feature.add_eos:
                value = _append_eos(value, _eos_id(name, feature), last_only=True)
        rekeyed[name] = value
    return rekeyed


def tokenize_and_append_eos(
    example: Example, output_features: Mapping[str, Feature], copy_pretokenized: bool = True
) -> Example:
    """Apply `tokenize`, then append EOS if the feature has `add_eos`."""
    return tokenize(example, output_features, copy_pretokenized, with_eos=True)


def append_eos(example: Example, output_features: Mapping[str, Feature]) -> Example:
    """Append EOS to the output features with `add_eos`. A later trim may remove it."""
    return append_eos_after_trim(example, output_features, sequence_length=None)


def append_eos_after_trim(
    example: Example, output_features: Mapping[str, Feature], sequence_length: Mapping[str, int] | None = None
) -> Example:
    """Trim the output features with `add_eos` to one less than their length, and append EOS.

    Args:
      example: has ids in its output features.
      output_features: features of the task.
      sequence_length: {feature: length}; a feature without a length is not trimmed.
    """
    result = dict(example)
    for name, feature in output_features.items():
        if name in example and feature.add_eos:
            length = (sequence_length or {}).get(name)
            result[name] = _append_eos(example[name], _eos_id(name, feature), length)
    return result


# A pipeline counts its truncations.
append_eos_after_trim.appends_eos_after_trim = True  # type: ignore[attr-defined]


def truncate_inputs_left(example: Example, sequence_length: Mapping[str, int] | None) -> Example:
    """Keep the end of `inputs` if it is longer than its length. Use it after tokenize and append_eos."""
    length = (sequence_length or {}).get("inputs")
    if length is None:
        return example
    return example | {"inputs": example["inputs"][-length:]}


def _encode(value: Any, name: str, feature: Feature) -> Any:
    if isinstance(value, list | tuple):
        encoded = [_encode(one, name, feature) for one in value]
        return _array(encoded, name, feature) if all(np.ndim(one) == 0 for one in encoded) else encoded
    try:
        ids = feature.vocabulary.encode(value)
    except UserError as error:
        raise UserError(f"feature {name!r}: {error}") from error
    return _array(ids, name, feature) if isinstance(ids, list) or np.ndim(ids) else ids


def _array(ids: Any, name: str, feature: Feature) -> np.ndarray:
    """Return `ids` with the feature's dtype."""
    try:
        encoded = np.asarray(ids, feature.dtype)
    except OverflowError as error:
        raise UserError(f"feature {name!r}: an id does not fit {feature.dtype}: {error}.") from error
    if isinstance(ids, np.ndarray) and encoded.dtype != ids.dtype and (wrong := ids[encoded != ids]).size:
        raise UserError(f"feature {name!r}: the id {wrong.flat[0]} does not fit {feature.dtype}.")
    return encoded


def _is_flat(value: Any) -> bool:
    return isinstance(value, np.ndarray) or all(np.ndim(one) == 0 for one in value)


def _append(ids: Any, eos: int, length: int | None) -> np.ndarray:
    ids = np.asarray(ids) if len(ids) else np.zeros(0, np.int32)
    ids = ids if length is None else ids[..., : length - 1]
    extended = np.empty((*ids.shape[:-1], ids.shape[-1] + 1), ids.dtype)
    extended[..., :-1] = ids
    extended[..., -1] = eos
    return extended


def _append_eos(value: Any, eos: int, length: int | None = None, *, last_only: bool = False) -> Any:
    """Append EOS to ids, to each of several, or to the last of them."""
    if _is_flat(value):
        return _append(value, eos, length)
    if last_only and _is_flat(value[0]):
        return [*value[:-1], _append(value[-1], eos, length)]
    return [_append_eos(one, eos, length, last_only=last_only) for one in value]


def _eos_id(name: str, feature: Feature) -> int:
    if feature.vocabulary.eos_id is None:
        raise UserError(
            f"feature {name!r} has add_eos=True, but its vocabulary {feature.vocabulary!r} has no EOS: "
            "set add_eos=False in its Feature."
        )
    return feature.vocabulary.eos_id
