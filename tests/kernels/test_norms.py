"""The norm's kernels, against plain JAX in float32. On a GPU: T5X_TEST_PLATFORM=cuda pytest tests/network."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels import norms
from t5x.kernels.ops import rms_norm
from tests.kernels.simulated import abstract_h200
from tests.support import tiny
from tests.support.paths import REPO
from tests.support.programs import run_python

INTERPRET = jax.default_backend() == "cpu"
EPSILON = 1e-6
NARROW = jnp.dtype("bfloat16")


def error(made, expected):
    made, expected = (np.asarray(x, np.float64) for x in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


def plain(x, scale):
    return rms_norm(x, scale, jnp.float32, EPSILON)


@pytest.mark.parametrize("residual", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(3, 37, 384), (2, 24, 2048)], ids=str)
def test_the_norm_and_its_gradients_are_those_of_float32(shape, residual):
    """One position in 37 is a block of one row; 384 features are loaded in chunks of 128."""
    x, to_x, to_norm = tiny.arrays(shape, shape, shape, scale=3.0)
    x, to_x, to_norm = x.astype(residual), to_x.astype(residual), to_norm.astype(NARROW)
    (scale,) = tiny.arrays(shape[-1:])
    x = x.at[0, 0].set(0.0)  # the padding of an embedding, say

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function, x, scale, gradient):
        made, backward = jax.vjp(function, x, scale)
        return made, backward(gradient)

    wide = [array.astype(jnp.float32) for array in (x, to_norm, to_x)]
    branch = lambda x, scale: norms.branch(x, scale, NARROW, EPSILON, INTERPRET)
    norm = lambda x, scale: branch(x, scale)[1]
    expected, (expected_x, expected_scale) = with_gradients(plain, wide[0], scale, wide[1])
    made, gradients = with_gradients(norm, x, scale, to_norm)
    (same, of_branch), of_both = with_gradients(branch, x, scale, [to_x, to_norm])

    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(of_branch, made)
    assert (made.dtype, gradients[0].dtype, gradients[1].dtype) == (NARROW, residual, jnp.float32)
    assert error(made, expected) < 0.005
    assert np.mean(made != rms_norm(x, scale, NARROW, EPSILON)) < 1e-3  # the same roundings
    # A position of zeros has gradients a thousand times those of the others.
    for these in (np.s_[0, 0], np.s_[-1, -1], np.s_[:, 1:]):
        assert error(gradients[0][these], expected_x[these]) < 0.005
        assert error(of_both[0][these], (expected_x + wide[2])[these]) < 0.005
    for of_scale in (gradients[1], of_both[1]):
        assert error(of_scale, expected_scale) < 0.005


def test_nan_and_infinity_are_passed_on():
    (x,) = tiny.arrays((1, 4, 128))
    x = x.at[0, 0, 5].set(jnp.nan).at[0, 1, 5].set(jnp.inf)
    made, backward = jax.vjp(lambda x: norms.branch(x, jnp.ones(128), NARROW, EPSILON, INTERPRET)[1], x)
    (gradient,) = backward(jnp.ones_like(made))
    for array in (made, gradient):
        assert np.isnan(np.asarray(array[0, :2], np.float32)).any(axis=1).all()
        assert np.isfinite(np.asarray(array[0, 2:], np.float32)).all()


# Run with four devices.
DIVIDED = """
import jax, jax.numpy as jnp, numpy as np
from t5x.kernels.choice import use
from t5x.network import layers
from t5x.network.keys import Keys
from t5x.partitioning import PjitPartitioner
from t5x.partitioning.logical import axis_rules
from tests.kernels.simulated import nvidia
from tests.support.tiny import arrays
x, weights = arrays((8, 64, 128), (8, 64, 128))
scale, *kernels = arrays((128,), (128, 64), (128, 64), (64, 128))
norm, mlp = layers.RMSNorm(jnp.float32), layers.MLP(64, ("gelu", "linear"), 0.3, jnp.float32)
def loss(x, scale, kernels):
    keys = Keys(None, jax.random.split(jax.random.key(0), 8))
    params = {name: {"kernel": kernel} for name, kernel in zip(("wi_0", "wi_1", "wo"), kernels)}
    x, y = norm.apply({"params": {"scale": scale}}, x, branch=True)
    y = x + mlp.apply({"params": params}, y, keys)
    return (weights * norm.apply({"params": {"scale": scale}}, y)).sum()
def gradients(mesh, rules, kernels_too):
    capability = 8.0 if kernels_too else 7.0
    def traced(*args):
        with axis_rules(mesh, rules), use(nvidia(capability, count=4)):
            return jax.value_and_grad(loss, (0, 1, 2))(*args)
    lowered = jax.jit(traced).lower(x, scale, kernels)
    regions = lowered.as_text().count("sdy.manual_computation") + lowered.as_text().count("jax.shard_map(")
    compiled = lowered.compile()
    return regions, compiled.as_text().count(" all-reduce("), jax.tree.leaves(compiled(x, scale, kernels))
dp, fsdp = PjitPartitioner(preset="dp"), PjitPartitioner(preset="fsdp")
tp = PjitPartitioner(preset="tp", num_partitions=2)
others = [[(axis, "model"), *tp.rules] for axis in ("embed", "length")]
for mesh, rules in [(p.mesh, p.rules) for p in (dp, fsdp, tp)] + [(tp.mesh, rules) for rules in others]:
    regions, sums, made = gradients(mesh, rules, True)
    none, sums_without, expected = gradients(mesh, rules, False)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())
    print(regions - none, sums - sums_without)
"""


@pytest.mark.slow
def test_devices_normalize_their_own_rows_and_sum_the_gradient_of_the_scale():
    """With the gate and its dropout, which each device computes for its rows and features.

    Two norms and a gate, forward and backward, run on each device; norms do not if their features are sharded. Not more
    is reduced than without kernels.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = run_python("-c", DIVIDED, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, cwd=REPO)
    assert done.returncode == 0, done.stderr
    *made, with_sharded_length = done.stdout.splitlines()
    assert made == ["6 0", "6 0", "6 0", "2 0"] and with_sharded_length.startswith("6 ")


@pytest.mark.parametrize("features", [768, 1024, 4096])
def test_kernels_lower_for_a_gpu(features):
    x = jax.ShapeDtypeStruct((64, 512, features), NARROW)
    scale = jax.ShapeDtypeStruct((features,), jnp.float32)
    norm = functools.partial(norms.branch, dtype=NARROW, epsilon=EPSILON)
    with_gradients = lambda x, scale, *gradients: jax.vjp(norm, x, scale)[1](list(gradients))
    device = abstract_h200()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(with_gradients).trace(x, scale, x, x).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


def test_features_that_are_not_a_multiple_of_a_chunk_are_left_to_xla():
    assert [size for size in (64, 100, 128, 768, 1000, 4096) if norms.fits(size)] == [128, 768, 4096]
