"""Convert values of tf.data examples to those of our sources, and back. TensorFlow is not imported."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Convert a tf.data value to one as in our sources, where texts are str."""
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if hasattr(value, "to_list"):  # ragged
        return _each(value.to_list(), _text)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _over(value, _text)
    return value


def as_tf_data(value: Any) -> Any:
    """Undo `plain`."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Mapping):
        return {name: as_tf_data(one) for name, one in value.items()}
    if isinstance(value, list):
        return _each(value, as_tf_data)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _over(value, as_tf_data)
    return value


def _text(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    return [_each(one, function) for one in value] if isinstance(value, list) else function(value)


def _over(array: np.ndarray, function: Callable[[Any], Any]) -> np.ndarray:
    made = np.empty(array.shape, object)
    for place, one in np.ndenumerate(array):
        made[place] = function(one)
    return made
