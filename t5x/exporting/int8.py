"""Weights as int8 with one scale per output channel."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

_SCALE = ".scale"  # of the array with the name before it
_LARGEST = 127


def quantize(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays with kernels and embeddings as int8, each followed by its float32 scales.

    A kernel [inputs, …, outputs] has a scale per output, an embedding [tokens, features] one per token. The output
    projections of feed-forward layers (`wo`) stay as they are: their inputs are the largest of T5, so errors grow
    there. Small arrays (norms, position biases) stay too.
    """
    quantized: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        *_, module, leaf = ("", *name.split("/"))
        if leaf not in ("kernel", "embedding") or module == "wo" or array.ndim < 2:
            quantized[name] = array
            continue
        values = np.asarray(array, np.float32)
        largest = np.abs(values).max(axis=0 if leaf == "kernel" else -1, keepdims=True)
        scale = np.where(largest > 0, largest / _LARGEST, 1).astype(np.float32)
        quantized[name] = np.rint(values / scale).astype(np.int8)
        quantized[name + _SCALE] = scale
    return quantized


def dequantize(arrays: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Return the arrays, of NumPy or traced, in the dtype instead of int8."""
    dequantized = {}
    for name, array in arrays.items():
        if name.endswith(_SCALE):
            continue
        scale = arrays.get(name + _SCALE)
        dequantized[name] = array if scale is None else (array.astype(jnp.float32) * scale).astype(dtype)
    return dequantized
