"""Ranking losses over the scores of passages."""

import jax
import jax.numpy as jnp


def listwise_softmax(scores: jax.Array, gains: jax.Array, is_real: jax.Array) -> jax.Array:
    """Return RankT5's loss: the cross entropy between gains and softmax of the scores, per list.

    >>> loss = listwise_softmax(jnp.array([[2.0, 0.0, 9.0]]), jnp.array([[1, 0, 0]]), jnp.array([[True, True, False]]))
    >>> round(float(loss[0]), 4)  # log(1 + exp(0 - 2))
    0.1269

    Args:
      scores: float [lists, passages].
      gains: relevance of each passage, at least 0, [lists, passages]; normalised to sum to 1 per list.
      is_real: bool [lists, passages]; False marks padding.

    Returns:
      float32 [lists]; 0 for lists without a relevant passage.
    """
    scores = jnp.where(is_real, scores.astype(jnp.float32), -jnp.inf)
    gains = jnp.where(is_real, gains, 0).astype(jnp.float32)
    total = jnp.sum(gains, axis=-1, keepdims=True)
    # Lists without anything real have no softmax: theirs is taken of zeros, and counts nothing.
    safe = jnp.where(jnp.any(is_real, axis=-1, keepdims=True), scores, 0.0)
    log_p = jnp.where(is_real, jax.nn.log_softmax(safe, axis=-1), 0.0)
    return -jnp.sum(gains / jnp.where(total > 0, total, 1.0) * log_p, axis=-1)
