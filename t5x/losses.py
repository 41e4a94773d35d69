"""The training loss: cross entropy with z-loss and label smoothing, and what it is normalised by."""

import enum
import functools
from collections.abc import Mapping
from typing import NamedTuple

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


class TokenLosses(NamedTuple):
    """Of every target token, for reporting: [batch, length].

    Attributes:
      loss: its cross entropy, float32, with the z-loss.
      z_loss: contained in it.
      is_right: whether it has the greatest logit.
    """

    loss: jax.Array
    z_loss: jax.Array
    is_right: jax.Array


_CHUNK_BYTES = 2**28  # of float32 logits, on a device


def projected_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, TokenLosses]:
    """The sum of `weights` * cross_entropy(scale * (hidden @ kernel), targets), and the losses of the tokens.

    All logits at once never exist: positions are taken a few at a time, and where gradients are wanted, those of hidden
    states and kernel are computed together with the loss.

    Args:
      hidden: [batch, length, emb].
      kernel: [emb, vocab]; cast to the dtype of the hidden states, while its gradient is summed up in float32.
      targets: int [batch, length].
      weights: float32 [batch, length]; not differentiated, and neither are the losses of the tokens.
    """
    length, logits = hidden.shape[1], targets.size * kernel.shape[1]
    parts = min(length, -(-4 * logits // (_CHUNK_BYTES * jax.device_count())))
    return _projected((float(scale), float(z_loss), float(label_smoothing), parts), hidden, kernel, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(static, hidden, kernel, targets, weights):
    return _projected_forward(static, hidden, kernel, targets, weights, with_gradients=False)[0]


def _projected_forward(static, hidden, kernel, targets, weights, *, with_gradients=True):
    scale, z_loss, label_smoothing, parts = static
    length, kernel_dtype = hidden.shape[1], kernel.dtype
    kernel = kernel.astype(hidden.dtype)

    def part_of(kernel_gradient, part):
        hidden, targets, weights = part
        logits = scale * jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
        (loss, z_part), residuals = _cross_entropy(logits, targets, z_loss, label_smoothing)
        losses = TokenLosses(loss, z_part, jnp.argmax(logits, axis=-1) == targets)
        if not with_gradients:
            return kernel_gradient, (losses, None)
        gradient, _ = _cross_entropy_backward(z_loss, label_smoothing, residuals, (weights,))
        gradient = (scale * gradient).astype(hidden.dtype)
        kernel_gradient += jnp.einsum("bld,blv->dv", hidden, gradient, preferred_element_type=jnp.float32)
        return kernel_gradient, (losses, jnp.einsum("blv,dv->bld", gradient, kernel))

    kernel_gradient = jnp.zeros(kernel.shape, jnp.float32) if with_gradients else None
    if parts == 1:
        kernel_gradient, (losses, hidden_gradient) = part_of(kernel_gradient, (hidden, targets, weights))
    else:
        size = -(-length // parts)

        def split(x):  # [batch, length, ...] -> [parts, batch, size, ...]; what is added at the end weighs nothing
            x = jnp.pad(x, ((0, 0), (0, parts * size - length)) + ((0, 0),) * (x.ndim - 2))
            return jnp.swapaxes(x.reshape(x.shape[0], parts, size, *x.shape[2:]), 0, 1)

        join = lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape[1], parts * size, *x.shape[3:])[:, :length]
        all_parts = jax.tree.map(split, (hidden, targets, weights))
        kernel_gradient, of_parts = jax.lax.scan(part_of, kernel_gradient, all_parts)
        losses, hidden_gradient = jax.tree.map(join, of_parts)
    gradients = (hidden_gradient, kernel_gradient.astype(kernel_dtype)) if with_gradients else None
    return (jnp.sum(losses.loss * weights), losses), gradients


def _projected_backward(static, gradients, cotangents):
    hidden_gradient, kernel_gradient = gradients
    by = cotangents[0]
    scaled = lambda gradient: (by * gradient).astype(gradient.dtype)
    return scaled(hidden_gradient), scaled(kernel_gradient), None, None


_projected.defvjp(_projected_forward, _projected_backward)


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
