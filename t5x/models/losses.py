"""Training loss: cross entropy with z-loss and label smoothing, and its normalization."""

import enum
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from t5x._runtime.errors import ArgumentError
from t5x.partitioning.logical import constrain, shards_of


@enum.unique
class SpecialLossNormalizingFactor(enum.Enum):
    """A normalizing factor computed from the batch. Gin files name it by a string, in any case."""

    NUM_REAL_TARGET_TOKENS = 1
    NUM_TOTAL_TARGET_TOKENS = 2
    AVERAGE_PER_SEQUENCE = 3


LossNormalizingFactor = float | int | str | SpecialLossNormalizingFactor | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
    logits: jax.Array, targets: jax.Array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Compute the cross entropy of every token.

    Args:
      logits: float [..., vocab].
      targets: int [...].
      z_loss: weight of log(Z)², which keeps the logits from drifting.
      label_smoothing: probability mass spread over the other tokens. The entropy of the smoothed target is subtracted,
        so that the loss of a perfect prediction is still 0.

    Returns:
      float32 [...] and float32 [...]: the loss, and the z-loss contained in it. The latter has no gradient.

    Example:
      >>> loss, _ = cross_entropy(jnp.log(jnp.array([[0.25, 0.75]])), jnp.array([1]))
      >>> float(jnp.exp(-loss[0]))
      0.75
    """
    return _cross_entropy(logits, targets, z_loss, label_smoothing)[0]


def _target_probabilities(vocab: int, label_smoothing: float) -> tuple[float, float]:
    """Return the probability of the target token and of every other token."""
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
    """Per-token results for metrics, each [batch, length].

    Attributes:
      loss: float32 cross entropy, including the z-loss.
      z_loss: float32 z-loss.
      is_right: bool, whether the target token has the largest logit.
    """

    loss: jax.Array
    z_loss: jax.Array
    is_right: jax.Array


_CHUNK_BYTES = 2**28  # float32 logits per device
_SYMBOLIC_CHUNK = 16  # positions per chunk where the number of rows is not known


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
    """Sum `weights` * cross_entropy(scale * (hidden @ kernel), targets) without materializing all logits.

    Positions are processed in chunks. Under differentiation, the gradients of `hidden` and `kernel` are computed
    together with the loss.

    Args:
      hidden: [batch, length, emb].
      kernel: [emb, vocab]; cast to the dtype of `hidden`. Its gradient is accumulated in float32.
      targets: int [batch, length].
      weights: float32 [batch, length].
      scale: multiplies the logits.
      z_loss, label_smoothing: see `cross_entropy`.

    Returns:
      The sum, and the losses of the tokens, which have no gradient; those of `projected_losses` do.
    """
    return _projected((float(scale), float(z_loss), float(label_smoothing)), hidden, kernel, targets, weights)


def projected_losses(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, scale: float = 1.0) -> TokenLosses:
    """Return the token losses of `projected_cross_entropy`, without z-loss and label smoothing, differentiable.

    The backward pass recomputes the logits of each chunk.

    Args:
      hidden, kernel, targets, scale: see `projected_cross_entropy`.
    """
    return _chunked_losses((scale, 0.0, 0.0), hidden, kernel, targets, jax.checkpoint)


def _chunked_losses(static, hidden, kernel, targets, transform=lambda function: function):
    """Compute TokenLosses chunk by chunk; `transform` wraps the function of a chunk."""

    @transform
    def losses_of(hidden, targets):
        return _token_losses(static, hidden, kernel.astype(hidden.dtype), targets)[0]

    step = lambda carry, chunk: (carry, losses_of(*chunk))
    return _scan_chunks(step, None, (hidden, targets), kernel.shape[1])[1]


def _token_losses(static, hidden, kernel, targets):
    """Return the TokenLosses of some positions, and the residuals of `_cross_entropy_backward`."""
    scale, z_loss, label_smoothing = static
    logits = scale * jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
    (loss, z_part), residuals = _cross_entropy(logits, targets, z_loss, label_smoothing)
    return TokenLosses(loss, z_part, jnp.argmax(logits, axis=-1) == targets), residuals


def _scan_chunks(step, carry, arrays, vocab_size):
    """Run `jax.lax.scan` over chunks of positions of the arrays [batch, length, ...]; see _CHUNK_BYTES."""
    batch, length = arrays[0].shape[:2]
    if is_symbolic_dim(batch):  # an export for any number of rows
        chunks = -(-length // _SYMBOLIC_CHUNK)
    else:
        chunks = min(length, -(-4 * batch * length * vocab_size // (_CHUNK_BYTES * jax.device_count())))
    if chunks == 1:
        return step(carry, arrays)
    size = -(-length // chunks)
    chunks = -(-length // size)

    def split(x):  # [batch, length, ...] -> [chunks, batch, size, ...]
        x = jnp.pad(x, ((0, 0), (0, chunks * size - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(batch, chunks, size, *x.shape[2:]), 0, 1)

    def join(x):
        return jnp.swapaxes(x, 0, 1).reshape(batch, chunks * size, *x.shape[3:])[:, :length]

    carry, results = jax.lax.scan(step, carry, jax.tree.map(split, arrays))
    return carry, jax.tree.map(join, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(static, hidden, kernel, targets, weights):
    losses = _chunked_losses(static, hidden, kernel.astype(hidden.dtype), targets)
    return jnp.sum(losses.loss * weights), losses


def _projected_forward(static, hidden, kernel, targets, weights):
    scale, z_loss, label_smoothing = static
    narrow = kernel.astype(hidden.dtype)
    # Weights may be tiny (1 / loss_normalizing_factor). Float16 gradients would underflow unless they are rescaled.
    greatest = jnp.max(jnp.abs(weights))
    unit = jnp.where(greatest > 0, greatest, 1.0)

    def step(kernel_gradient, chunk):
        hidden, targets, weights = chunk
        losses, residuals = _token_losses(static, hidden, narrow, targets)
        gradient, _ = _cross_entropy_backward(z_loss, label_smoothing, residuals, (weights,))
        gradient = (scale * gradient).astype(hidden.dtype)
        kernel_gradient = _accumulate_matmul(kernel_gradient, hidden, gradient)
        return kernel_gradient, (losses, jnp.einsum("blv,dv->bld", gradient, narrow))

    groups = _row_groups(hidden.shape[0])
    zeros = jnp.zeros(kernel.shape if groups == 1 else (groups, *kernel.shape), jnp.float32)
    chunked = (hidden, targets, weights / unit)
    kernel_gradient, (losses, hidden_gradient) = _scan_chunks(step, zeros, chunked, kernel.shape[1])
    if groups > 1:
        kernel_gradient = jnp.sum(kernel_gradient, axis=0)
    gradients = hidden_gradient, kernel_gradient.astype(kernel.dtype), unit, losses.loss
    return (jnp.sum(losses.loss * weights), losses), gradients


def _row_groups(batch):
    """Return the number of data-parallel groups. Each accumulates locally; the groups are reduced once.

    There is one group if the kernel is sharded over the same devices, which could not hold a whole sum each.
    """
    groups = shards_of("batch")
    return 1 if batch % groups or shards_of("embed") > 1 else groups


def _accumulate_matmul(sums, x, y):
    """Add x'y of x [batch, length, d] and y [batch, length, v] to sums [d, v] or, per group of rows, [groups, d, v]."""
    if sums.ndim == 2:
        return sums + jnp.einsum("bld,blv->dv", x, y, preferred_element_type=jnp.float32)
    x, y = (a.reshape(sums.shape[0], -1, *a.shape[1:]) for a in (x, y))
    sums += jnp.einsum("gbld,gblv->gdv", x, y, preferred_element_type=jnp.float32)
    return constrain(sums, "batch", None, "vocab")


def _projected_backward(static, gradients, cotangents):
    del static
    hidden_gradient, kernel_gradient, unit, token_losses = gradients
    cotangent = cotangents[0]

    def scaled(gradient):
        return (cotangent * unit * gradient).astype(gradient.dtype)

    return scaled(hidden_gradient), scaled(kernel_gradient), None, cotangent * token_losses


_projected.defvjp(_projected_forward, _projected_backward)


def loss_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return `decoder_loss_weights` as float32 [batch, length]; ones if the batch has none."""
    if (weights := batch.get("decoder_loss_weights")) is not None:
        return weights.astype(jnp.float32)
    return jnp.ones(batch["decoder_target_tokens"].shape, jnp.float32)


def loss_scale(factor: LossNormalizingFactor, batch: Mapping[str, jax.Array], pad_id: int = 0) -> jax.Array:
    """Return the factor of each target token's loss in the sum, float32 [batch, length].

    It is computed over the whole batch, so that splitting the batch into microbatches does not change the loss.

    Args:
      factor: None (plain sum), a number, or a SpecialLossNormalizingFactor or its name.
      batch: has `decoder_target_tokens`, and optionally `decoder_loss_weights` and, if packed, `decoder_segment_ids`.
      pad_id: the padding token.

    Raises:
      ArgumentError: if `factor` is an unknown name.
    """
    weights = loss_weights(batch)
    if factor is None:
        return weights
    if isinstance(factor, int | float):
        return weights / factor
    total, weights = _special_factor_and_weights(factor, batch, pad_id)
    return weights / (total if isinstance(total, int) else jnp.maximum(total, 1.0))


def _special_factor_and_weights(
    factor: str | SpecialLossNormalizingFactor, batch: Mapping[str, jax.Array], pad_id: int = 0
) -> tuple[int | jax.Array, jax.Array]:
    """Return what a special factor divides the loss by, and weights. It does not count padding, unlike a plain sum."""
    kind = special_loss_normalizing_factor(factor)
    if batch.get("decoder_loss_weights") is None:
        batch = {**batch, "decoder_loss_weights": batch["decoder_target_tokens"] != pad_id}
    weights = loss_weights(batch)
    if kind is SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
        return batch["decoder_target_tokens"].size, weights
    if kind is SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE:
        weights = _weights_per_sequence(batch)
    return jnp.sum(weights), weights


def _weights_per_sequence(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the weights of AVERAGE_PER_SEQUENCE: they sum to 1 in every sequence with targets, packed or not."""
    targets, weights = batch["decoder_target_tokens"], loss_weights(batch)
    segments = batch.get("decoder_segment_ids")
    weights = weights if segments is None else jnp.where(segments > 0, weights, 0.0)
    same = jnp.ones_like(targets)[:, :, None] if segments is None else segments[:, :, None] == segments[:, None, :]
    same = jnp.broadcast_to(same, (*targets.shape, targets.shape[1])).astype(jnp.float32)
    length = jnp.einsum("bqk,bk->bq", same, weights)
    return weights / jnp.where(length > 0, length, 1.0)


def special_loss_normalizing_factor(name: str | SpecialLossNormalizingFactor) -> SpecialLossNormalizingFactor:
    """Return the special factor of that name, ignoring case.

    Raises:
      ArgumentError: if there is no such factor.
    """
    if isinstance(name, SpecialLossNormalizingFactor):
        return name
    try:
        return SpecialLossNormalizingFactor[str(name).upper()]
    except KeyError:
        known = ", ".join(f.name for f in SpecialLossNormalizingFactor)
        raise ArgumentError(f"loss_normalizing_factor is {name!r}. Use a number, None, or one of {known}.") from None


# --- T5X's functions, for models with a loss of their own -------------------------------------------------------------


def convert_special_loss_normalizing_factor_to_enum(x: str) -> SpecialLossNormalizingFactor:
    """Return the special factor of that name, ignoring case."""
    return special_loss_normalizing_factor(x)


def cross_entropy_with_logits(
    logits: jax.Array, targets: jax.Array, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Compute the cross entropy with target distributions; see `cross_entropy` for target tokens.

    Args:
      logits: float [..., vocab].
      targets: float [..., vocab], one-hot or smoothed.
      z_loss: weight of log(Z)².

    Returns:
      float [...] and float [...]: the loss, and the z-loss contained in it. The latter has no gradient.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    z_part = z_loss * jnp.square(log_z)
    loss = jnp.sum(targets * (log_z[..., None] - logits), axis=-1) + z_part
    return loss, jax.lax.stop_gradient(z_part)


def compute_weighted_cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum the weighted cross entropy of all tokens.

    Args:
      logits: float [..., vocab].
      targets: int [...].
      weights: [...]; None is all ones.
      label_smoothing, z_loss: see `cross_entropy`.
      loss_normalizing_factor: divides the result; None is 1.

    Returns:
      The loss, the z-loss contained in it, and the sum of the weights.
    """
    if logits.ndim != targets.ndim + 1:
        raise ValueError(f"logits need one more axis than targets; the shapes are {logits.shape} and {targets.shape}")
    per_token, z_part = cross_entropy(logits, targets, z_loss, label_smoothing)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    factor = 1.0 if loss_normalizing_factor is None else loss_normalizing_factor
    return jnp.sum(per_token * weights) / factor, jnp.sum(z_part * weights) / factor, jnp.sum(weights)


def get_loss_normalizing_factor_and_weights(
    loss_normalizing_factor: LossNormalizingFactor, batch: Mapping[str, jax.Array]
) -> tuple[float | jax.Array | None, jax.Array | None]:
    """Return a factor and weights for `compute_weighted_cross_entropy`; both are of this (micro)batch alone.

    Args:
      loss_normalizing_factor, batch: see `loss_scale`.
    """
    if loss_normalizing_factor is None or isinstance(loss_normalizing_factor, int | float):
        return loss_normalizing_factor, batch.get("decoder_loss_weights")
    return _special_factor_and_weights(loss_normalizing_factor, batch)
