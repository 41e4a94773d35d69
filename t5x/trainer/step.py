"""One training step and one evaluation step: pure functions with T5X's names, for trainers of users."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x._runtime.errors import UserError
from t5x.checkpoints.tree import flatten
from t5x.metrics.accumulators import AveragePerStep, Metrics, as_one_step, merge
from t5x.models import BaseModel
from t5x.network import fp8
from t5x.optimizers.protocol import trained
from t5x.trainer.nonfinite import gradient_metrics
from t5x.trainer.train_state import TrainState


class WeightMetricsComputer:
    """T5X's weight metrics, for `trainer.Trainer.weight_metrics_computer`.

    For every parameter, averaged over the steps of a line of metrics (RMS: root mean square):

        weight_rms/<name>                           of the new value
        weight_max/<name>                           its largest magnitude
        weight_gradient_rms/<name>                  of the gradient
        weight_update_rms/<name>                    of new - old
        weight_update_divided_by_weight_rms/<name>  of (new - old) / old, where old is not zero

    and `weight_gradient_norm`, of all gradients together. These are five metrics per parameter: scanned layers have far
    fewer parameters than unrolled ones.
    """

    def compute_metrics(self, gradients: Any, old_train_state: TrainState, new_train_state: TrainState) -> Metrics:
        """Return the metrics of one step. A pure function."""
        old, new, gradients = (flatten(t) for t in (old_train_state.params, new_train_state.params, gradients))
        update = {name: new[name] - old[name] for name in old}
        relative = {name: _relative_rms(update[name], old[name]) for name in old}
        squares = sum(jnp.sum(jnp.square(gradient)) for gradient in gradients.values())
        metrics = {
            **_each("weight_rms", _rms, new),
            **_each("weight_gradient_rms", _rms, gradients),
            "weight_gradient_norm": jnp.sqrt(squares),
            **_each("weight_update_rms", _rms, update),
            **_each("weight_update_divided_by_weight_rms", lambda x: x, relative),
            **_each("weight_max", lambda x: jnp.max(jnp.abs(x)), new),
        }
        return {name: AveragePerStep(total=value) for name, value in metrics.items()}


def _each(prefix: str, function: Any, flat: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {f"{prefix}/{name}": function(value) for name, value in flat.items()}


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _relative_rms(update: jax.Array, weight: jax.Array) -> jax.Array:
    there = weight != 0
    ratio = jnp.where(there, update / jnp.where(there, weight, 1), 0)
    return jnp.sqrt(jnp.sum(jnp.square(ratio)) / jnp.maximum(jnp.sum(there), 1))


Batch = Mapping[str, jax.Array]

_FP8 = "fp8"  # entry of `flax_mutables`


def train_with_lr(
    train_state: TrainState,
    batch: Batch,
    learning_rate: jax.Array,
    dropout_rng: jax.Array,
    model: BaseModel,
    num_microbatches: int | None,
    weight_metrics_computer: WeightMetricsComputer | None = None,
    data_partition_spec: Any = None,
) -> tuple[TrainState, Metrics]:
    """Compute the gradients of the whole batch and apply the optimizer.

    The result does not depend on the number of microbatches.

    Args:
      learning_rate: used where the optimizer has no learning rate of its own.
      dropout_rng: key of this step. Dropout is keyed by it and each example's row.
      weight_metrics_computer: adds metrics of every weight.
      data_partition_spec: accepted for compatibility with T5X; microbatches are always spread over all devices.

    Returns:
      The new state and the metrics of the step.
    """
    grads, metrics, mutables = accumulate_grads_microbatched(
        model, train_state, batch, dropout_rng, num_microbatches, data_partition_spec
    )
    variables = {"flax_mutables": mutables}
    return apply_grads(train_state, grads, metrics, learning_rate, weight_metrics_computer, variables)


def apply_grads(
    train_state: TrainState,
    grad_accum: Any,
    metrics: Metrics,
    learning_rate: jax.Array,
    weight_metrics_computer: WeightMetricsComputer | None,
    other_state_variables: Mapping[str, Any] | None = None,
) -> tuple[TrainState, Metrics]:
    """Apply the optimizer. Return the new state, and the metrics with those of the gradients and the learning rate.

    Args:
      other_state_variables: further arguments of `train_state.apply_gradient`: `flax_mutables`.
    """
    new_state = train_state.apply_gradient(grad_accum, learning_rate=learning_rate, **(other_state_variables or {}))
    metrics = {
        **metrics,
        "learning_rate": AveragePerStep(total=learning_rate),
        **gradient_metrics(trained(train_state.optimizer_def, grad_accum)),
    }
    if weight_metrics_computer is not None:
        metrics |= weight_metrics_computer.compute_metrics(grad_accum, train_state, new_state)
    return new_state, metrics


def accumulate_grads_microbatched(
    model: BaseModel,
    train_state: TrainState,
    batch: Batch,
    dropout_rng: jax.Array,
    num_microbatches: int | None,
    data_partition_spec: Any = None,
) -> tuple[Any, Metrics, Any]:
    """Return the gradients, float32, and the metrics of the batch, accumulated over `num_microbatches` microbatches.

    The third value is the new `flax_mutables`.
    """
    rows = next(iter(batch.values())).shape[0]
    batch = {**model.with_loss_scale(batch)}
    if model.keys_dropout_by_row:
        batch["row_index"] = jnp.arange(rows, dtype=jnp.int32)
    history = train_state.flax_mutables.get(_FP8, {})
    mutables = {name: tree for name, tree in train_state.flax_mutables.items() if name != _FP8}

    loss_fn: Callable[..., Any] = model.loss_fn  # of some models, it also takes mutables

    def loss(params, fp8_scales, batch, rng, mutables):
        batch = {**batch, "fp8_scales": fp8_scales} if fp8_scales else batch
        if not mutables:
            value, metrics = loss_fn(params, batch, rng)
            return value, (metrics, mutables)
        return loss_fn(params, batch, rng, mutables)

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    params, scales, count = train_state.params, fp8.scales(history), num_microbatches or 1
    if count == 1:
        (grads, amax), (metrics, mutables) = gradient(params, scales, batch, dropout_rng, mutables)
    else:
        (grads, amax), metrics, mutables = _in_microbatches(
            gradient, params, scales, batch, dropout_rng, mutables, count, model.keys_dropout_by_row
        )
    return grads, metrics, {**mutables, **({_FP8: fp8.next_history(history, amax)} if history else {})}


def _in_microbatches(
    gradient: Callable[..., Any],
    params: Any,
    scales: Any,
    batch: Batch,
    dropout_rng: jax.Array,
    mutables: Any,
    count: int,
    one_key: bool,
) -> tuple[Any, Metrics, Any]:
    rows = next(iter(batch.values())).shape[0]
    if rows % count:
        raise UserError(f"trainer.Trainer.num_microbatches is {count}, which does not divide the batch size {rows}.")
    # Microbatch i takes every num_microbatches-th row, so that each device has rows in each microbatch.
    parts = {name: jnp.swapaxes(x.reshape(rows // count, count, *x.shape[1:]), 0, 1) for name, x in batch.items()}
    # A custom module keys dropout by position: each microbatch needs its own key.
    same = (count, *dropout_rng.shape)
    rngs = jnp.broadcast_to(dropout_rng, same) if one_key else jax.random.split(dropout_rng, count)

    def add(carry, part_and_rng):
        total, mutables = carry
        (grads, amax), (metrics, mutables) = gradient(params, scales, *part_and_rng, mutables)
        total = jax.tree.map(jnp.add, total[0], grads), jax.tree.map(jnp.maximum, total[1], amax)
        return (total, mutables), metrics

    # The loop starts from zeros, so that the gradient is compiled once.
    start = jax.tree.map(jnp.zeros_like, (params, scales)), mutables
    (grads, mutables), each = jax.lax.scan(add, start, (parts, rngs))
    first, others = jax.tree.map(lambda x: x[0], each), jax.tree.map(lambda x: x[1:], each)
    metrics, _ = jax.lax.scan(lambda total, metrics: (merge(total, metrics), None), first, others)
    return grads, as_one_step(metrics), mutables


def eval_step(model: BaseModel, train_state: TrainState, batch: Batch) -> Metrics:
    """Return the metrics of a batch under teacher forcing, without dropout."""
    return model.eval_fn(train_state.params, batch)[1]
