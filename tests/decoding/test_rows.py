"""Operations on rows, against NumPy and JAX."""

import jax
import numpy as np
import pytest

from t5x.decoding import state


@pytest.mark.parametrize("values", [7, 1000], ids=["ties", "few ties"])
def test_top_k_of_blocks_is_that_of_the_whole_row(values):
    x = np.random.default_rng(0).integers(0, values, (5, 3, 128 * 40)).astype(np.float32)
    for actual, expected in zip(jax.jit(state.top_k, static_argnums=1)(x, 6), jax.lax.top_k(x, 6), strict=True):
        np.testing.assert_array_equal(actual, expected)
