"""The loss; tests/network/test_parity.py compares it with an independent implementation."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.models import losses
from tests.support.paths import REPO
from tests.support.programs import run_python


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_gradient_is_that_of_the_definition(smoothing, z_loss):
    logits = jax.random.normal(jax.random.key(0), (3, 5, 11)) * 3
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)

    def plain(logits):
        log_probs = jax.nn.log_softmax(logits)
        soft = jnp.where(jax.nn.one_hot(targets, 11) > 0, 1 - smoothing, smoothing / 10)
        entropy = -jnp.sum(soft * jnp.log(soft + 1e-20), axis=-1)
        return -jnp.sum(soft * log_probs, -1) - entropy + z_loss * jax.nn.logsumexp(logits, -1) ** 2

    ours = lambda logits: losses.cross_entropy(logits, targets, z_loss, smoothing)[0]
    cotangent = jax.random.normal(jax.random.key(2), (3, 5))

    def with_gradient(of):
        loss, backward = jax.vjp(of, logits)
        return loss, backward(cotangent)[0]

    compiled = jax.jit(with_gradient, static_argnums=0)
    (found, gradient), (wanted, wanted_gradient) = compiled(ours), compiled(plain)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-5)


def projection():
    """Return hidden states, kernel, targets and weights."""
    keys = [jax.random.key(i) for i in range(4)]
    hidden, kernel = jax.random.normal(keys[0], (3, 7, 5)), jax.random.normal(keys[1], (5, 11))
    return hidden, kernel, jax.random.randint(keys[2], (3, 7), 0, 11), jax.random.uniform(keys[3], (3, 7))


@pytest.mark.parametrize("chunk_bytes", [2**28, 800, 1], ids=["one chunk", "uneven chunks", "single positions"])
def test_the_chunked_loss_is_that_of_all_logits(monkeypatch, chunk_bytes):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
    hidden, kernel, targets, weights = projection()
    options = {"z_loss": 0.01, "label_smoothing": 0.1}

    def plain(hidden, kernel):
        loss, z_loss = losses.cross_entropy(0.7 * (hidden @ kernel), targets, **options)
        return jnp.sum(loss * weights), losses.TokenLosses(loss, z_loss, jnp.argmax(hidden @ kernel, -1) == targets)

    def ours(hidden, kernel):
        return losses.projected_cross_entropy(hidden, kernel, targets, weights, scale=0.7, **options)

    (found, tokens), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(hidden, kernel)
    (wanted, wanted_tokens), wanted_grads = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(hidden, kernel)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(ours)(hidden, kernel)[0], wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), tokens, wanted_tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, wanted_grads)


@pytest.mark.parametrize("chunk_bytes", [2**28, 800])
def test_chunked_token_losses_can_be_differentiated(monkeypatch, chunk_bytes):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
    hidden, kernel, targets, weights = projection()
    plain = lambda h, k: jnp.sum(jnp.tanh(losses.cross_entropy(0.7 * (h @ k), targets)[0]) * weights)
    ours = lambda h, k: jnp.sum(jnp.tanh(losses.projected_losses(h, k, targets, 0.7).loss) * weights)
    found, wanted = (jax.jit(jax.grad(of, (0, 1)))(hidden, kernel) for of in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_weights_of_the_chunked_loss_have_a_gradient():
    hidden, kernel, targets, weights = projection()
    of = lambda weights: losses.projected_cross_entropy(hidden, kernel, targets, weights)[0]
    wanted = losses.cross_entropy(hidden @ kernel, targets)[0]
    np.testing.assert_allclose(jax.jit(jax.grad(of))(weights), wanted, rtol=1e-5)


def test_a_large_normalizing_factor_does_not_underflow_in_float16():
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 4)).astype(jnp.float16)
    kernel = jax.random.normal(jax.random.key(1), (4, 900))
    targets = jax.random.randint(jax.random.key(2), (2, 3), 0, 900)
    of = lambda k, weight: losses.projected_cross_entropy(hidden, k, targets, jnp.full((2, 3), weight))[0]
    found, wanted = (jax.jit(jax.grad(of))(kernel, weight) for weight in (1 / 233472, 1.0))
    np.testing.assert_allclose(found * 233472, wanted, rtol=1e-3, atol=1e-6)


def test_the_gradient_of_a_bfloat16_loss_is_float32_for_the_kernel():
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 4)).astype(jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (4, 9))
    of = lambda h, k: losses.projected_cross_entropy(h, k, jnp.ones((2, 3), jnp.int32), jnp.full((2, 3), 0.1))[0]
    of_hidden, of_kernel = jax.jit(jax.grad(of, (0, 1)))(hidden, kernel)
    assert (of_hidden.dtype, of_kernel.dtype) == (jnp.bfloat16, jnp.float32)


def test_huge_logits_stay_finite():
    logits = jnp.array([[1e30, 0.0, -1e30]])
    loss, _ = losses.cross_entropy(logits, jnp.array([0]))
    assert loss == 0.0
    assert jnp.isfinite(jax.grad(lambda x: losses.cross_entropy(x, jnp.array([0]))[0].sum())(logits)).all()


def test_a_batch_without_a_single_target_has_loss_zero():
    batch = {"decoder_target_tokens": jnp.zeros((2, 3), jnp.int32), "decoder_loss_weights": jnp.zeros((2, 3))}
    for factor in (None, "NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE", "NUM_TOTAL_TARGET_TOKENS"):
        assert (losses.loss_scale(factor, batch) == 0).all()


def test_an_unknown_factor_lists_the_known_ones():
    with pytest.raises(UserError, match=r"'per_token'.*NUM_REAL_TARGET_TOKENS"):
        losses.special_loss_normalizing_factor("per_token")


# Rows on four devices, in four chunks: values, gradients, and the all-reduces inside the loop over chunks.
OVER_DEVICES = """
import json, re
import jax, numpy as np
from t5x.models import losses
from t5x.partitioning import PjitPartitioner

losses._CHUNK_BYTES = 8 * 12 * 256 // 4
rng = np.random.default_rng(0)
hidden, kernel = (rng.standard_normal(shape, np.float32) for shape in ((8, 12, 16), (16, 256)))
targets, weights = rng.integers(0, 256, (8, 12)), rng.random((8, 12), np.float32)
of = lambda h, k, t, w: jax.value_and_grad(lambda h, k: losses.projected_cross_entropy(h, k, t, w)[0], (0, 1))(h, k)
expected = jax.jit(of)(hidden, kernel, targets, weights)
found = {}
for preset in ("dp", "tp", "fsdp"):
    at = PjitPartitioner(preset=preset, **({"num_partitions": 2} if preset == "tp" else {}))
    divided = at.sharding(kernel.shape, ("embed", "vocab"))
    shardings = (at.batch_sharding, divided, at.batch_sharding, at.batch_sharding)
    compiled = at.partition(of, in_axis_resources=shardings, out_axis_resources=at.replicated)
    compiled = compiled.lower(hidden, kernel, targets, weights).compile()
    text = compiled.as_text()
    bodies = set(re.findall(r"body=%?([\\w.-]+)", text))
    parts = [part for part in re.split(r"\\n(?=%|ENTRY)", text) if part.split(" ")[0].lstrip("%") in bodies]
    assert parts
    sums = re.findall(r"= f32\\[([\\d,]+)\\]\\S* all-reduce", "".join(parts))
    values = compiled(*(jax.device_put(x, s) for x, s in zip((hidden, kernel, targets, weights), shardings)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), values, expected)
    found[preset] = sums
print(json.dumps(found))
"""


def test_data_parallel_devices_reduce_the_kernel_gradient_once():
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"}
    done = run_python("-c", OVER_DEVICES, env=env, cwd=REPO)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not {"16,256", "16,128"} & {*found["dp"], *found["tp"]}
