"""The trainer: a state and the compiled functions that update and evaluate it."""

import functools
import logging
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from t5x.errors import UserError
from t5x.metrics.accumulators import Metrics, compute, merge
from t5x.models import BaseTransformerModel
from t5x.network import padding
from t5x.optimizers import applied_schedule
from t5x.optimizers.schedules import Schedule
from t5x.partitioning import PjitPartitioner
from t5x.trainer.state import StateLayout, TrainState
from t5x.trainer.step import eval_step, train_step
from t5x.trainer.weight_metrics import WeightMetricsComputer

log = logging.getLogger(__name__)


class Trainer:
    """The state of a run; every step replaces it.

    Args:
      model: the model to train.
      train_state: initial state.
      partitioner: the mesh.
      layout: shapes, axes and shardings of the state.
      rng: key for dropout.
      learning_rate_fn: step -> learning rate. Optimizers, or parts of them, with their own rate ignore it.
      num_microbatches: number of microbatches per batch, to save memory; None, 0 or 1 uses the whole batch.
      weight_metrics_computer: adds metrics of every weight.

    Attributes:
      learning_rate_fn: the logged schedule; see `t5x.optimizers.applied_schedule`.
    """

    def __init__(
        self,
        model: BaseTransformerModel,
        train_state: TrainState,
        partitioner: PjitPartitioner,
        layout: StateLayout,
        rng: jax.Array,
        learning_rate_fn: Schedule,
        num_microbatches: int | None = None,
        weight_metrics_computer: WeightMetricsComputer | None = None,
    ):
        if num_microbatches is not None and num_microbatches < 0:
            raise UserError(f"trainer.Trainer.num_microbatches is {num_microbatches}: it must not be negative.")
        self.model = model
        self.state = train_state
        self.partitioner = partitioner
        self.layout = layout
        self.learning_rate_fn = applied_schedule(
            model.optimizer_def, learning_rate_fn, train_state.param_states, train_state.step
        )
        shardings, batch, whole = layout.shardings, partitioner.batch_sharding, partitioner.replicated
        self._train = partitioner.partition(
            functools.partial(
                train_step,
                model,
                layout.axes,
                learning_rate_fn,
                num_microbatches or 1,
                rng,
                logged_rate_fn=self.learning_rate_fn,
                weight_metrics=weight_metrics_computer,
            ),
            in_shardings=(shardings, batch),
            out_shardings=(shardings, whole),
            donate_argnums=(0,),
            large_matmuls=True,
        )
        self._eval = partitioner.partition(
            functools.partial(eval_step, model), in_shardings=(shardings.params, batch), out_shardings=whole,
            large_matmuls=True,
        )  # fmt: skip

    def compile(self, batch: Mapping[str, np.ndarray]) -> float:
        """Compile the train step for batches of this shape. Return the seconds it took."""
        began = time.perf_counter()
        self._train = self._train.lower(self.layout.abstract, self.partitioner.to_devices(batch)).compile()
        return time.perf_counter() - began

    def step(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Start one step. Return its metrics, which the devices may still be computing."""
        padding.check(self.model, batch)
        self.state, metrics = self._train(self.state, self.partitioner.to_devices(batch))
        return metrics

    def measure(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Start an evaluation under teacher forcing. Return its metrics without waiting, like `step`."""
        padding.check(self.model, batch)
        return self._eval(self.state.params, self.partitioner.to_devices(batch))


def summarize(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Return the metrics of several steps combined."""
    return compute(functools.reduce(merge, on_host(metrics))) if metrics else {}


def on_host(metrics: Sequence[Metrics]) -> list[Metrics]:
    """Wait for the metrics of several steps. Return them as Python numbers, which neither overflow nor lose digits."""
    return jax.tree.map(lambda x: x.item(), jax.device_get(list(metrics)))
