"""T5X's names in annotations of trainers, and of what ends a run early."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from t5x.metrics.accumulators import merge
from t5x.trainer.actions import ActionMode, BaseAction
from t5x.trainer.signals import Stopped
from t5x.trainer.trainer import BaseTrainer

ActionMapType = Mapping[ActionMode, Sequence[BaseAction]]
BaseTrainerConstructor = Callable[..., BaseTrainer]
LearningRateCallable = SummarizeMetricsCallable = Callable[..., Any]
PartitionedEvalCallable = PartitionedTrainCallable = Callable[..., Any]
MetricValueMapType = Mapping[str, float]
ArrayMapFuture = MetricValueMapFuture = TimeFuture = Future
PreemptionError = Stopped
merge_metrics = merge
