"""The gate's and FP8's kernels, against plain JAX in float32. On a GPU: T5X_TEST_PLATFORM=cuda pytest tests/network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels import elementwise
from t5x.network import layers
from t5x.network.keys import Keys
from tests.support import tiny

INTERPRET = jax.default_backend() == "cpu"
ROWS, FEATURES = (3, 16), 48


def error(made, expected):
    made, expected = (np.asarray(x, np.float64) for x in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


@functools.partial(jax.jit, static_argnums=2)
def quantize(x, scale, dtype):
    return elementwise.quantize(x, scale, jnp.dtype(dtype), interpret=INTERPRET)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.25])
@pytest.mark.parametrize("activations", [("gelu", "linear"), ("silu", "relu", "tanh")], ids="-".join)
def test_the_gate_and_its_gradient_are_those_of_float32(activations, dropout_rate):
    parts, gradient = tiny.arrays((*ROWS, len(activations), FEATURES), (*ROWS, FEATURES), scale=2.0)
    parts = np.array(parts)
    parts[0, :, 0, :10] = [-1e12, -1e4, -300, -40, -12, -9, -7, 7, 12, 1e4]
    narrow = parts, gradient = [np.asarray(x).astype(jnp.bfloat16) for x in (parts, gradient)]
    keys = Keys(None, jax.random.split(jax.random.key(0), ROWS[0]))
    keep = keys.keep((1, FEATURES), dropout_rate)
    factors = jnp.where(keep, 1.0 / (1.0 - dropout_rate), 0.0) if dropout_rate else None
    gate = functools.partial(elementwise.gate, factors=factors, activations=activations, interpret=INTERPRET)

    def plain(parts):
        return layers.gate([parts[..., i, :] for i in range(len(activations))], activations, dropout_rate, keys)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradient(function, parts, gradient):
        out, backward = jax.vjp(function, parts)
        return out, backward(gradient)[0]

    made, made_gradient = with_gradient(gate, *narrow)
    expected, expected_gradient = with_gradient(plain, *(x.astype(np.float32) for x in narrow))
    assert made.dtype == parts.dtype
    assert np.mean(np.asarray(expected) == 0) >= 0.8 * dropout_rate
    assert error(made, expected) < 0.005
    made, expected = (np.asarray(x, np.float64) for x in (made_gradient, expected_gradient))
    for part in range(len(activations)):
        assert error(made[..., part, :], expected[..., part, :]) < 0.005


@pytest.mark.parametrize("shape", [(48, 16), (160, 272)], ids=str)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_quantized_values_their_transpose_and_the_largest_value(shape, dtype):
    x = np.asarray(tiny.arrays(shape, scale=3.0)[0]).astype(jnp.bfloat16)
    x[0, 1], x[2, 3], x[5, 5] = 1e6, -1e6, np.nan
    scale = 16.0
    made, transposed, _ = quantize(x, np.float32(scale), dtype)
    top = float(jnp.finfo(dtype).max)
    expected = np.clip(scale * x.astype(np.float32), -top, top).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(made).astype(np.float32), expected)
    np.testing.assert_array_equal(np.asarray(transposed).astype(np.float32).T, expected)


def test_the_largest_value_is_over_all_blocks_and_infinity_becomes_nan():
    for at in ((0, 0), (159, 271), (40, 200)):
        x = np.array(tiny.arrays((160, 272))[0])
        x[at] = -7.5
        assert quantize(x, np.float32(1), "float8_e4m3fn")[2] == 7.5
        x[at] = np.inf
        assert np.isnan(np.asarray(quantize(x, np.float32(1), "float8_e4m3fn")[0]).astype(np.float32)[at])
