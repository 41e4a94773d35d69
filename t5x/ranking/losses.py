"""Losses of rankers, over the scores that they give passages."""

import jax
import jax.numpy as jnp


def listwise_softmax(scores: jax.Array, gains: jax.Array, is_real: jax.Array) -> jax.Array:
    """RankT5's: the cross entropy between the gains and the softmax of the scores, of every list.

    >>> loss = listwise_softmax(jnp.array([[2.0, 0.0, 9.0]]), jnp.array([[1, 0, 0]]), jnp.array([[True, True, False]]))
    >>> round(float(loss[0]), 4)  # log(1 + exp(0 - 2))
    0.1269

    Args:
      scores: float [lists, passages].
      gains: how relevant each passage is, at least 0, [lists, passages]; of every list they are divided by their sum.
      is_real: bool [lists, passages]; others are no part of their list.

    Returns:
      float32 [lists]; 0 where nothing is relevant.
    """
    scores = jnp.where(is_real, scores.astype(jnp.float32), -jnp.inf)
    gains = jnp.where(is_real, gains, 0).astype(jnp.float32)
    total = jnp.sum(gains, axis=-1, keepdims=True)
    # Lists without anything real have no softmax: theirs is taken of zeros, and counts nothing.
    safe = jnp.where(jnp.any(is_real, axis=-1, keepdims=True), scores, 0.0)
    log_p = jnp.where(is_real, jax.nn.log_softmax(safe, axis=-1), 0.0)
    return -jnp.sum(gains / jnp.where(total > 0, total, 1.0) * log_p, axis=-1)
