"""The trainer: its state, one step, the loop around it, and evaluation during training."""

from t5x.trainer.actions import ActionMode, BaseAction, EarlyStoppingAction, TerminateOnNanAction
from t5x.trainer.loop import Timetable, run_loop
from t5x.trainer.signals import Interrupted, Stopped, StopRequest
from t5x.trainer.state import StateLayout, TrainState
from t5x.trainer.trainer import Trainer
from t5x.trainer.weight_metrics import WeightMetricsComputer

__all__ = [
    "ActionMode",
    "BaseAction",
    "EarlyStoppingAction",
    "Interrupted",
    "StateLayout",
    "StopRequest",
    "Stopped",
    "TerminateOnNanAction",
    "Timetable",
    "TrainState",
    "Trainer",
    "WeightMetricsComputer",
    "run_loop",
]
