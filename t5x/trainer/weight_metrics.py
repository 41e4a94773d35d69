"""Metrics of every parameter: its size, its gradient, and its change in a step."""

from typing import Any

import jax
import jax.numpy as jnp

from t5x.checkpoints.tree import flatten
from t5x.metrics.accumulators import AveragePerStep, Metrics
from t5x.train_state import TrainState


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
