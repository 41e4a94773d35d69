"""The trainer: its state, one step, the loop around it, and evaluation during training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x.metrics.accumulators import merge as merge_metrics
from t5x.trainer.actions import ActionMode, BaseAction, EarlyStoppingAction, TerminateOnNanAction
from t5x.trainer.loop import Timetable, run_loop
from t5x.trainer.metrics_manager import Finished, MetricsManager
from t5x.trainer.signals import Interrupted, Stopped, StopRequest
from t5x.trainer.state import StateLayout, TrainState
from t5x.trainer.step import accumulate_grads_microbatched, apply_grads, eval_step, train_with_lr
from t5x.trainer.trainer import BaseTrainer, Trainer
from t5x.trainer.weight_metrics import WeightMetricsComputer

# T5X's names in annotations, and of what ends a run early.
ActionMapType = Mapping[ActionMode, Sequence[BaseAction]]
BaseTrainerConstructor = Callable[..., BaseTrainer]
LearningRateCallable = SummarizeMetricsCallable = Callable[..., Any]
PartitionedEvalCallable = PartitionedTrainCallable = Callable[..., Any]
MetricValueMapType = Mapping[str, float]
ArrayMapFuture = MetricValueMapFuture = TimeFuture = Finished
PreemptionError = Stopped

__all__ = [
    "ActionMapType",
    "ActionMode",
    "ArrayMapFuture",
    "BaseAction",
    "BaseTrainer",
    "BaseTrainerConstructor",
    "EarlyStoppingAction",
    "Interrupted",
    "LearningRateCallable",
    "MetricValueMapFuture",
    "MetricValueMapType",
    "MetricsManager",
    "PartitionedEvalCallable",
    "PartitionedTrainCallable",
    "PreemptionError",
    "StateLayout",
    "StopRequest",
    "Stopped",
    "SummarizeMetricsCallable",
    "TerminateOnNanAction",
    "TimeFuture",
    "Timetable",
    "TrainState",
    "Trainer",
    "WeightMetricsComputer",
    "accumulate_grads_microbatched",
    "apply_grads",
    "eval_step",
    "merge_metrics",
    "run_loop",
    "train_with_lr",
]
