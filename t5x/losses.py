"""The training loss: cross entropy with z-loss and label smoothing, and what it is normalised by."""

import enum
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t5x.errors import UserError


@enum.unique
class SpecialLossNormalizingFactor(enum.Enum):
    """A normaliser computed from the batch. Gin files name it as a string, in any case."""

    NUM_REAL_TARGET_TOKENS = 1
    NUM_TOTAL_TARGET_TOKENS = 2
    AVERAGE_PER_SEQUENCE = 3


LossNormalizingFactor = float | int | str | SpecialLossNormalizingFactor | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
    logits: jax.Array, targets: jax.Array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of every token, and the z-loss in it.

    Args:
      logits: float [..., vocab].
      targets: int [...].
      z_loss: weight of log(Z)², which keeps the logits from drifting.
      label_smoothing: probability spread over the other tokens; the entropy of the smoothed target is subtracted, so
        that a perfect prediction still costs nothing.

    Returns:
      (loss, z_loss), float32 [...]; the second is contained in the first, and is for reporting: it has no gradient.
    """
    return _cross_entropy(logits, targets, z_loss, label_smoothing)[0]


def _target_probabilities(vocab: int, label_smoothing: float) -> tuple[float, float]:
    """Probability of the target token and of each other one."""
    return 1.0 - label_smoothing, label_smoothing / (vocab - 1) if label_smoothing else 0.0


def _cross_entropy(logits, targets, z_loss, label_smoothing):
    logits = logits.astype(jnp.float32)
    high, low = _target_probabilities(logits.shape[-1], label_smoothing)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    expected = (high - low) * jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    entropy = 0.0
    if label_smoothing:
        expected += low * jnp.sum(logits, axis=-1)
        entropy = -(high * np.log(high) + (logits.shape[-1] - 1) * low * np.log(low))
    z_part = z_loss * jnp.square(log_z) if z_loss else jnp.zeros_like(log_z)
    return (log_z - expected - entropy + z_part, z_part), (logits, targets, log_z)


def _cross_entropy_backward(z_loss, label_smoothing, residuals, cotangents):
    logits, targets, log_z = residuals
    high, low = _target_probabilities(logits.shape[-1], label_smoothing)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    softmax = jnp.exp(logits - log_z[..., None])
    scale = (1.0 + 2.0 * z_loss * log_z)[..., None] if z_loss else 1.0
    gradient = softmax * scale - jnp.where(is_target, high, low)
    return gradient * cotangents[0][..., None], None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_backward)


def loss_scale(factor: LossNormalizingFactor, batch: Mapping[str, jax.Array]) -> jax.Array:
    """What each target token's loss is multiplied with before the sum, float32 [batch, length].

    Computed over the whole batch, so that cutting it into microbatches changes nothing.

    Args:
      factor: None (the plain sum), a number, or a SpecialLossNormalizingFactor or its name.
      batch: has `decoder_target_tokens`, maybe `decoder_loss_weights` and, if packed, `decoder_segment_ids`.
    """
    targets = batch["decoder_target_tokens"]
    weights = batch.get("decoder_loss_weights")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    if factor is None:
        return weights
    if isinstance(factor, int | float):
        return weights / factor
    kind = special_loss_normalizing_factor(factor)
    if kind is SpecialLossNormalizingFactor.NUM_REAL_TARGET_TOKENS:
        return weights / jnp.maximum(jnp.sum(weights), 1.0)
    if kind is SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
        return weights / targets.size
    # AVERAGE_PER_SEQUENCE: every sequence with something to predict counts the same, packed or not.
    segments = batch.get("decoder_segment_ids")
    same = jnp.ones_like(targets)[:, :, None] if segments is None else segments[:, :, None] == segments[:, None, :]
    length = jnp.einsum(
        "bqk,bk->bq", jnp.broadcast_to(same, (*targets.shape, targets.shape[1])).astype(jnp.float32), weights
    )
    scale = weights / jnp.where(length > 0, length, 1.0)
    return scale / jnp.maximum(jnp.sum(scale), 1.0)


def special_loss_normalizing_factor(name: str | SpecialLossNormalizingFactor) -> SpecialLossNormalizingFactor:
    """The special factor of that name, in any case."""
    if isinstance(name, SpecialLossNormalizingFactor):
        return name
    try:
        return SpecialLossNormalizingFactor[str(name).upper()]
    except KeyError:
        known = ", ".join(f.name for f in SpecialLossNormalizingFactor)
        raise UserError(f"loss_normalizing_factor is {name!r}: give a number, None, or one of {known}.") from None
