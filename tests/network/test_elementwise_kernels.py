"""The gate's and FP8's kernels, against plain JAX in float32. On a GPU: T5X_TEST_PLATFORM=cuda pytest tests/network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.network import elementwise_kernels, layers
from tests import tiny

INTERPRET = jax.default_backend() == "cpu"
ROWS, FEATURES = (3, 16), 48


def error(made, expected):
    made, expected = (np.asarray(x, np.float64) for x in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("activations", [("gelu", "linear"), ("silu", "relu", "tanh")], ids="-".join)
def test_the_gate_and_its_gradient_are_those_of_float32(activations):
    joined, gradient = tiny.arrays((*ROWS, len(activations), FEATURES), (*ROWS, FEATURES), scale=2.0)
    joined = joined.at[0, :, 0, :9].set(jnp.array([-1e4, -300, -40, -12, -9, -7, 7, 12, 1e4]))
    joined, gradient = (x.astype(jnp.bfloat16) for x in (joined, gradient))
    gate = functools.partial(elementwise_kernels.gate, activations=activations, interpret=INTERPRET)
    made, backward = jax.vjp(gate, joined)
    plain = functools.partial(layers.gate, activations=activations)
    expected, expected_backward = jax.vjp(plain, joined.astype(jnp.float32))
    assert made.dtype == joined.dtype
    assert error(made, expected) < 0.005
    made, expected = backward(gradient)[0], expected_backward(gradient.astype(jnp.float32))[0]
    for part in range(len(activations)):
        assert error(made[..., part, :], expected[..., part, :]) < 0.005


@pytest.mark.parametrize("shape", [(48, 16), (160, 272)], ids=str)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_quantized_values_their_transpose_and_the_largest_value(shape, dtype):
    (x,) = (x.astype(jnp.bfloat16) for x in tiny.arrays(shape, scale=3.0))
    x = x.at[0, 1].set(1e6).at[2, 3].set(-1e6).at[5, 5].set(jnp.nan)
    scale = 16.0
    made, transposed, _ = elementwise_kernels.quantize(x, jnp.float32(scale), dtype, interpret=INTERPRET)
    top = float(jnp.finfo(dtype).max)
    expected = jnp.clip(scale * x.astype(jnp.float32), -top, top).astype(dtype).astype(jnp.float32)
    np.testing.assert_array_equal(made.astype(jnp.float32), expected)
    np.testing.assert_array_equal(transposed.astype(jnp.float32).T, expected)


def test_the_largest_value_is_over_all_blocks_and_infinity_becomes_nan():
    (x,) = tiny.arrays((160, 272))
    quantize = lambda x: elementwise_kernels.quantize(x, jnp.float32(1), jnp.float8_e4m3fn, interpret=INTERPRET)
    for at in ((0, 0), (159, 271), (40, 200)):
        assert quantize(x.at[at].set(-7.5))[2] == 7.5
        assert np.isnan(np.asarray(quantize(x.at[at].set(jnp.inf))[0].astype(jnp.float32))[at])
