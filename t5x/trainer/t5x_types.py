"""T5X's names in annotations of trainers, and of what ends a run early."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x.metrics.accumulators import merge as merge_metrics
from t5x.trainer.actions import ActionMode, BaseAction
from t5x.trainer.metrics_manager import Finished
from t5x.trainer.signals import Stopped
from t5x.trainer.trainer import BaseTrainer

__all__ = [
    "ActionMapType",
    "ArrayMapFuture",
    "BaseTrainerConstructor",
    "LearningRateCallable",
    "MetricValueMapFuture",
    "MetricValueMapType",
    "PartitionedEvalCallable",
    "PartitionedTrainCallable",
    "PreemptionError",
    "SummarizeMetricsCallable",
    "TimeFuture",
    "merge_metrics",
]

ActionMapType = Mapping[ActionMode, Sequence[BaseAction]]
BaseTrainerConstructor = Callable[..., BaseTrainer]
LearningRateCallable = SummarizeMetricsCallable = Callable[..., Any]
PartitionedEvalCallable = PartitionedTrainCallable = Callable[..., Any]
MetricValueMapType = Mapping[str, float]
ArrayMapFuture = MetricValueMapFuture = TimeFuture = Finished
PreemptionError = Stopped
