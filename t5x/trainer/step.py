"""One training step and one evaluation step: pure functions."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x.errors import UserError
from t5x.metrics.accumulators import AveragePerStep, Metrics, as_one_step, merge
from t5x.models import BaseTransformerModel
from t5x.network import fp8
from t5x.optimizers import trained
from t5x.optimizers.schedules import Schedule
from t5x.trainer.nonfinite import gradient_metrics
from t5x.trainer.state import TrainState
from t5x.trainer.weight_metrics import WeightMetricsComputer

Batch = Mapping[str, jax.Array]


def train_step(
    model: BaseTransformerModel,
    axes: Any,
    learning_rate_fn: Schedule,
    num_microbatches: int,
    rng: jax.Array,
    state: TrainState,
    batch: Batch,
    *,
    logged_rate_fn: Schedule | None = None,
    weight_metrics: WeightMetricsComputer | None = None,
) -> tuple[TrainState, Metrics]:
    """Compute the gradients of the whole batch and apply the optimizer.

    The result does not depend on the number of microbatches.

    Args:
      axes: logical axes of the parameters.
      learning_rate_fn: the trainer's schedule; used where the optimizer has no learning rate of its own.
      rng: key of the run. Dropout is keyed by it, the step and each example's row.
      logged_rate_fn: schedule of the metric `learning_rate`; `learning_rate_fn` if None.
      weight_metrics: adds metrics of every weight.

    Returns:
      The new state and the metrics of the step.
    """
    dropout_rng = jax.random.fold_in(rng, state.step)
    rows = batch["decoder_target_tokens"].shape[0]
    batch = {**model.with_loss_scale(batch), "row_index": jnp.arange(rows, dtype=jnp.int32)}
    history = state.flax_mutables.get("fp8", {})
    (grads, amax), metrics = accumulate_gradients(
        model, state.params, batch, dropout_rng, num_microbatches, fp8.scales(history)
    )
    optimizer = model.optimizer_def
    params, param_states = optimizer.update(
        grads, state.param_states, state.params, axes, step=state.step, learning_rate=learning_rate_fn(state.step)
    )
    mutables = {"fp8": fp8.next_history(history, amax)} if history else {}
    new_state = TrainState(state.step + 1, params, param_states, mutables)
    logged = (logged_rate_fn or learning_rate_fn)(state.step)
    metrics |= {"learning_rate": AveragePerStep(logged), **gradient_metrics(trained(optimizer, grads))}
    if weight_metrics is not None:
        metrics |= weight_metrics.compute_metrics(grads, state, new_state)
    return new_state, metrics


def accumulate_gradients(
    model: BaseTransformerModel,
    params: Any,
    batch: Batch,
    dropout_rng: jax.Array,
    num_microbatches: int,
    fp8_scales: Any,
) -> tuple[tuple[Any, Any], Metrics]:
    """Return the gradients, float32, and the metrics of the batch, accumulated over `num_microbatches` microbatches.

    The gradients are a pair: those of the parameters, and the amax in place of those of `fp8_scales` (see
    `network.fp8`).
    """

    def loss(params, fp8_scales, batch, rng):
        return model.loss_fn(params, {**batch, "fp8_scales": fp8_scales} if fp8_scales else batch, rng)

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    if num_microbatches == 1:
        return gradient(params, fp8_scales, batch, dropout_rng)
    rows = batch["decoder_target_tokens"].shape[0]
    if rows % num_microbatches:
        raise UserError(
            f"trainer.Trainer.num_microbatches is {num_microbatches}, which does not divide the batch size {rows}."
        )
    # Microbatch i takes every num_microbatches-th row, so that each device has rows in each microbatch.
    split = lambda x: jnp.swapaxes(x.reshape(rows // num_microbatches, num_microbatches, *x.shape[1:]), 0, 1)
    parts = {name: split(x) for name, x in batch.items()}
    if model.keys_dropout_by_row:
        rngs = jnp.broadcast_to(dropout_rng, num_microbatches)
    else:  # a custom module keys dropout by position: each microbatch needs its own key
        rngs = jax.random.split(dropout_rng, num_microbatches)

    def add(total, part_and_rng):
        (grads, amax), metrics = gradient(params, fp8_scales, *part_and_rng)
        return (jax.tree.map(jnp.add, total[0], grads), jax.tree.map(jnp.maximum, total[1], amax)), metrics

    # The loop starts from zeros, so that the gradient is compiled once.
    grads, each = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, (params, fp8_scales)), (parts, rngs))
    first, rest = (jax.tree.map(at, each) for at in (lambda x: x[0], lambda x: x[1:]))
    metrics, _ = jax.lax.scan(lambda total, one: (merge(total, one), None), first, rest)
    return grads, as_one_step(metrics)


def eval_step(model: BaseTransformerModel, params: Any, batch: Batch) -> Metrics:
    """Return the metrics of a batch under teacher forcing, without dropout."""
    return model.eval_fn(params, batch)[1]
