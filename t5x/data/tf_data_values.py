"""Convert values of tf.data examples to those of our sources, and back. TensorFlow is not imported."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def from_tf_data(value: Any) -> Any:
    """Convert a tf.data value to one as in our sources, where strings are str."""
    return _convert(value, _decode_bytes)


def to_tf_data(value: Any) -> Any:
    """Undo `from_tf_data`."""
    return _convert(value, lambda one: one.encode() if isinstance(one, str) else one)


def _convert(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every element of nested mappings, lists and object arrays."""
    if hasattr(value, "to_list"):  # ragged
        value = value.to_list()
    if isinstance(value, Mapping):
        return {name: _convert(one, function) for name, one in value.items()}
    if isinstance(value, list):
        return [_convert(one, function) for one in value]
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        converted = np.empty(value.shape, object)
        for place, one in np.ndenumerate(value):
            converted[place] = _convert(one, function)
        return converted
    return function(value)


def _decode_bytes(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value
