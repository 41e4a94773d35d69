"""The trainer: its state, one step, the loop around it, and evaluation during training."""

from t5x.trainer.actions import ActionMode, BaseAction, EarlyStoppingAction, TerminateOnNanAction
from t5x.trainer.loop import Timetable, run_loop
from t5x.trainer.signals import Interrupted, Stopped, StopRequest
from t5x.trainer.state import StateLayout, TrainState
from t5x.trainer.step import accumulate_grads_microbatched, apply_grads, eval_step, train_with_lr
from t5x.trainer.trainer import BaseTrainer, Trainer
from t5x.trainer.weight_metrics import WeightMetricsComputer

__all__ = [
    "ActionMode",
    "BaseAction",
    "BaseTrainer",
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
    "accumulate_grads_microbatched",
    "apply_grads",
    "eval_step",
    "run_loop",
    "train_with_lr",
]
