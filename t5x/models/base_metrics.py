"""T5X's metrics of a batch, for models that compute their own loss."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from t5x.metrics.accumulators import Average, AveragePerStep, Metrics, StepsPerTime, Sum, Time, TimeRate


def compute_weighted_accuracy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted number of targets with the largest logit, and the sum of the weights.

    Args:
      logits: float [..., vocab].
      targets: int [...].
      weights: [...]; None is all ones.
    """
    if logits.ndim != targets.ndim + 1:
        raise ValueError(f"logits need one more axis than targets; the shapes are {logits.shape} and {targets.shape}")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    return jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights), jnp.sum(weights)


def count_packed_examples(segment_ids: jax.Array) -> jax.Array:
    """Return the number of examples in packed rows, int [rows, length] with 0 for padding.

    Example:
      >>> int(count_packed_examples(jnp.array([[1, 1, 2, 0], [1, 1, 1, 1]])))
      3
    """
    starts = jnp.diff(segment_ids, axis=-1, prepend=0) != 0
    return jnp.sum(starts & (segment_ids != 0))


def compute_base_metrics(
    logits: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    loss: jax.Array,
    z_loss: jax.Array | None = None,
    segment_ids: Mapping[str, jax.Array] | None = None,
) -> Metrics:
    """Return T5X's metrics of a batch.

    Args:
      logits: float [batch, length, vocab].
      targets: int [batch, length].
      mask: weights of the targets; None is all ones.
      loss: total loss of the batch, including the z-loss.
      z_loss: z-loss contained in it.
      segment_ids: {feature: int [batch, length]} of packed rows.
    """
    right, tokens = compute_weighted_accuracy(logits, targets, mask)
    packed = [count_packed_examples(ids) for ids in (segment_ids or {}).values()]
    sequences = jnp.max(jnp.stack(packed)) if packed else jnp.asarray(targets.shape[0])
    devices = jax.device_count()
    metrics = {
        "accuracy": Average(right, tokens),
        "loss": AveragePerStep(total=loss),
        "loss_per_nonpadding_target_token": Average(loss, tokens),
        "loss_per_all_target_tokens": Average(loss, targets.size),
        "timing/seqs_per_second": TimeRate.from_model_output(sequences),
        "timing/steps_per_second": StepsPerTime.from_model_output(),
        "timing/seconds": Time(),
        "timing/seqs": Sum(sequences),
        "timing/seqs_per_second_per_core": TimeRate.from_model_output(sequences / devices),
        "timing/target_tokens_per_second": TimeRate.from_model_output(tokens),
        "timing/target_tokens_per_second_per_core": TimeRate.from_model_output(tokens / devices),
        "non_padding_fraction/loss_weights": Average(tokens, targets.size),
    }
    for name, ids in (segment_ids or {}).items():
        feature = name.removesuffix("_segment_ids")
        metrics[f"non_padding_fraction/{feature}"] = Average(jnp.sum(ids > 0), ids.size)
        metrics[f"effective_batch_size/{feature}"] = AveragePerStep(total=count_packed_examples(ids))
    if z_loss is not None:
        metrics |= {
            "z_loss": AveragePerStep(total=z_loss),
            "z_loss_per_all_target_tokens": Average(z_loss, targets.size),
            "cross_ent_loss": AveragePerStep(total=loss - z_loss),
            "cross_ent_loss_per_all_target_tokens": Average(loss - z_loss, targets.size),
        }
    return metrics


def compute_metrics(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    loss: jax.Array,
    weight_sum: jax.Array,
    additional_metrics: Metrics,
) -> Metrics:
    """Return accuracy, loss and target tokens of a batch, with `additional_metrics`."""
    right, _ = compute_weighted_accuracy(logits, targets, weights)
    metrics = {
        "cross_ent_loss": Sum(loss),
        "cross_ent_loss_per_nonpadding_target_token": Average(loss, weight_sum),
        "accuracy": Average(right, weight_sum),
    }
    return metrics | dict(additional_metrics)
