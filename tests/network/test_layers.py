"""What the small layers do beyond what parity with other implementations shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.network import layers

sum_by_token = jax.jit(layers.sum_by_token, static_argnums=2)


@pytest.mark.parametrize("places", [1, 5, 300, 5000])
def test_sums_by_token_are_those_of_float64_in_any_order(places):
    rng = np.random.default_rng(places)
    tokens = rng.integers(0, 40, places)
    tokens[: places // 2] = 7  # a frequent one
    x = (rng.normal(size=(places, 4)) * 10.0 ** rng.integers(-3, 1, (places, 1))).astype(np.float32)
    wanted = np.zeros((40, 4))
    np.add.at(wanted, tokens, x.astype(np.float64))
    found = sum_by_token(jnp.array(x), jnp.array(tokens), 40)
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(x).max() * places**0.5, rtol=1e-6)
    order = rng.permutation(places)
    np.testing.assert_array_equal(found, sum_by_token(jnp.array(x[order]), jnp.array(tokens[order]), 40))


def test_sums_by_token_of_all_that_is_greatest_do_not_overflow():
    found = sum_by_token(jnp.full((2048, 512, 1), -3.0), jnp.zeros((2048, 512), jnp.int32), 2)
    np.testing.assert_allclose(found, [[-3.0 * 2**20], [0.0]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sums_by_token_hide_no_bad_number(bad):
    assert np.isnan(sum_by_token(jnp.array([[1.0], [bad]]), jnp.array([0, 1]), 2)).all()
