"""The training loss: cross entropy with z-loss and label smoothing, and what it is normalised by."""

import enum
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x.errors import UserError
from t5x.partitioning.logical import constrain, parts_of


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
      weights: float32 [batch, length].

    Returns:
      (sum, losses): the losses are for reporting, and have no gradient; those of `projected_losses` have.
    """
    return _projected((float(scale), float(z_loss), float(label_smoothing)), hidden, kernel, targets, weights)


def projected_losses(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLosses:
    """The losses of the tokens as `projected_cross_entropy` has them, to be differentiated.

    All logits at once never exist here either: the backward pass computes those of a few positions anew.
    """

    @jax.checkpoint
    def of_part(hidden, targets):
        return _token_losses((scale, z_loss, label_smoothing), hidden, kernel.astype(hidden.dtype), targets)[0]

    step = lambda carry, part: (carry, of_part(*part))
    return _in_parts(step, None, (hidden, targets), kernel.shape[1])[1]


def _token_losses(static, hidden, kernel, targets):
    """Of some positions: TokenLosses, and what `_cross_entropy_backward` needs."""
    scale, z_loss, label_smoothing = static
    logits = scale * jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
    (loss, z_part), residuals = _cross_entropy(logits, targets, z_loss, label_smoothing)
    return TokenLosses(loss, z_part, jnp.argmax(logits, axis=-1) == targets), residuals


def _in_parts(step, carry, arrays, vocab_size):
    """`jax.lax.scan` of (carry, part of the arrays) -> (carry, result) over their positions, [batch, length, ...].

    As many positions are in a part as logits of them may be in memory.
    """
    batch, length = arrays[0].shape[:2]
    parts = min(length, -(-4 * batch * length * vocab_size // (_CHUNK_BYTES * jax.device_count())))
    if parts == 1:
        return step(carry, arrays)
    size = -(-length // parts)
    parts = -(-length // size)

    def split(x):  # [batch, length, ...] -> [parts, batch, size, ...]
        x = jnp.pad(x, ((0, 0), (0, parts * size - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(batch, parts, size, *x.shape[2:]), 0, 1)

    join = lambda x: jnp.swapaxes(x, 0, 1).reshape(batch, parts * size, *x.shape[3:])[:, :length]
    carry, results = jax.lax.scan(step, carry, jax.tree.map(split, arrays))
    return carry, jax.tree.map(join, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(static, hidden, kernel, targets, weights):
    narrow = kernel.astype(hidden.dtype)
    step = lambda carry, part: (carry, _token_losses(static, part[0], narrow, part[1])[0])
    losses = _in_parts(step, None, (hidden, targets), kernel.shape[1])[1]
    return jnp.sum(losses.loss * weights), losses


def _projected_forward(static, hidden, kernel, targets, weights):
    scale, z_loss, label_smoothing = static
    narrow = kernel.astype(hidden.dtype)
    # Weights may be tiny, of a loss that is divided by much: what float16 holds are gradients of weights of 1.
    greatest = jnp.max(jnp.abs(weights))
    unit = jnp.where(greatest > 0, greatest, 1.0)

    def step(kernel_gradient, part):
        hidden, targets, weights = part
        losses, residuals = _token_losses(static, hidden, narrow, targets)
        gradient, _ = _cross_entropy_backward(z_loss, label_smoothing, residuals, (weights,))
        gradient = (scale * gradient).astype(hidden.dtype)
        kernel_gradient = _add_products(kernel_gradient, hidden, gradient)
        return kernel_gradient, (losses, jnp.einsum("blv,dv->bld", gradient, narrow))

    groups = _row_groups(hidden.shape[0])
    nothing = jnp.zeros(kernel.shape if groups == 1 else (groups, *kernel.shape), jnp.float32)
    kernel_gradient, (losses, hidden_gradient) = _in_parts(
        step, nothing, (hidden, targets, weights / unit), kernel.shape[1]
    )
    if groups > 1:
        kernel_gradient = jnp.sum(kernel_gradient, axis=0)
    gradients = hidden_gradient, kernel_gradient.astype(kernel.dtype), unit, losses.loss
    return (jnp.sum(losses.loss * weights), losses), gradients


def _row_groups(batch):
    """Into how many groups rows are divided over devices, each of which sums its own up, and all of them once.

    Where the kernel itself is divided over the same devices, which have no room for a sum each, there are none.
    """
    groups = parts_of("batch")
    return 1 if batch % groups or parts_of("embed") > 1 else groups


def _add_products(sums, x, y):
    """sums [d, v] + x'y of x [batch, length, d] and y [batch, length, v]; [groups, d, v], that of each group's rows."""
    if sums.ndim == 2:
        return sums + jnp.einsum("bld,blv->dv", x, y, preferred_element_type=jnp.float32)
    x, y = (a.reshape(sums.shape[0], -1, *a.shape[1:]) for a in (x, y))
    sums += jnp.einsum("gbld,gblv->gdv", x, y, preferred_element_type=jnp.float32)
    return constrain(sums, "batch", None, "vocab")


def _projected_backward(static, gradients, cotangents):
    del static
    hidden_gradient, kernel_gradient, unit, of_tokens = gradients
    by = cotangents[0]
    scaled = lambda gradient: (by * unit * gradient).astype(gradient.dtype)
    return scaled(hidden_gradient), scaled(kernel_gradient), None, by * of_tokens


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
