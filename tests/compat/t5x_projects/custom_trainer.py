"""A trainer that also reports how far the parameters have moved, and scales the learning rate."""

from functools import cached_property

import jax
import jax.numpy as jnp

from t5x import metrics, trainer


class MovingTrainer(trainer.Trainer):
    def __init__(self, *args, rate_factor=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self._rate_factor = rate_factor

    @cached_property
    def _partitioned_train_step(self):
        def train_step(train_state, batch):
            grads, found, mutables = trainer.accumulate_grads_microbatched(
                self._model, train_state, batch, self._get_step_rng(train_state.step), self._num_microbatches
            )
            rate = self._rate_factor * self._learning_rate_fn(train_state.step)
            new_state, found = trainer.apply_grads(
                train_state, grads, found, rate, self._weight_metrics_computer, {"flax_mutables": mutables}
            )
            distances = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), new_state.params, train_state.params)
            moved = jnp.sqrt(sum(jax.tree.leaves(distances)))
            return new_state, {**found, "moved": metrics.AveragePerStep.from_model_output(moved)}

        return self._partitioner.partition(
            train_step,
            in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
            out_axis_resources=(self._train_state_axes, None),
            donate_argnums=(0,),
        )
