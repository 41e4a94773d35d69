"""The loss itself; its agreement with an independent implementation is in tests/network/test_parity.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import losses
from t5x.errors import UserError


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
    np.testing.assert_allclose(ours(logits), plain(logits), rtol=1e-5, atol=1e-5)
    cotangent = jax.random.normal(jax.random.key(2), (3, 5))
    grads = [jax.vjp(f, logits)[1](cotangent)[0] for f in (ours, plain)]
    np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-5)


def test_huge_logits_stay_finite():
    logits = jnp.array([[1e30, 0.0, -1e30]])
    loss, _ = losses.cross_entropy(logits, jnp.array([0]))
    assert loss == 0.0
    assert jnp.isfinite(jax.grad(lambda x: losses.cross_entropy(x, jnp.array([0]))[0].sum())(logits)).all()


def test_a_batch_without_a_single_target_has_loss_zero():
    batch = {"decoder_target_tokens": jnp.zeros((2, 3), jnp.int32), "decoder_loss_weights": jnp.zeros((2, 3))}
    for factor in (None, "NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE", "NUM_TOTAL_TARGET_TOKENS"):
        assert (losses.loss_scale(factor, batch) == 0).all()


def test_unknown_factor_names_the_known_ones():
    with pytest.raises(UserError, match=r"'per_token'.*NUM_REAL_TARGET_TOKENS"):
        losses.special_loss_normalizing_factor("per_token")
