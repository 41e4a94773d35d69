"""What the small layers do beyond what parity with other implementations shows."""

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels.choice import choose, use
from t5x.kernels.gpu_ops import sum_by_token
from t5x.kernels.ops import Hardware
from t5x.network import layers
from t5x.network.keys import Keys
from tests.support import tiny

sum_by_token = jax.jit(sum_by_token, static_argnums=2)


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


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_separate_matmuls_of_a_gpu_are_those_of_a_cpu(dtype):
    x, *weights = tiny.arrays((4, 128, 16), (4, 128, 24), (4, 128, 9), (4, 128, 8))
    names = {"query": 24, "key": 9, "value": 8}
    params = {name: {"kernel": tiny.arrays((16, size), seed=size)[0]} for name, size in names.items()}

    class Projections(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernels = [layers.Kernel(size, ("embed", "heads"), jnp.bfloat16, name=name) for name, size in names.items()]
            return layers.project(self, x, kernels, Keys(), dtype=dtype)

    def loss(x, params):
        results = Projections().apply({"params": params}, x)
        return sum((result.astype(jnp.float32) * w).sum() for result, w in zip(results, weights, strict=True)), results

    run = lambda: jax.value_and_grad(loss, (0, 1), has_aux=True)(x, params)
    expected = run()
    with use(choose(Hardware("gpu"))):
        assert str(jax.make_jaxpr(loss)(x, params)).count("optimization_barrier") == 1
        found = run()
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    # Gradients of x are sums of three, rounded to bfloat16 in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01 * np.abs(b).max()), found, expected)


@pytest.mark.slow
def test_layers_are_exported_for_any_number_of_rows():
    with jax.default_device(jax.devices("cpu")[0]):
        norm, mlp = layers.RMSNorm(jnp.float32), layers.MLP(48, ("gelu", "linear"), 0.0, jnp.float32)
        (x,) = tiny.arrays((2, 32, 128))
        params = [norm.init(jax.random.key(0), x), mlp.init(jax.random.key(0), x, Keys())]

        def both(x):
            x, y = norm.apply(params[0], x, branch=True)
            return x + mlp.apply(params[1], y, Keys())

        any_rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 32, 128"), jnp.float32)
        exported = jax.export.export(jax.jit(both), platforms=["cpu"])(any_rows)
        np.testing.assert_allclose(exported.call(x), both(x), atol=1e-5)
