"""The trainer: its state, one step, the loop around it, and evaluation inside training."""

from t5x.trainer.loop import Timetable, Window, run_loop
from t5x.trainer.signals import Stopped, StopRequest
from t5x.trainer.state import StateLayout, TrainState
from t5x.trainer.trainer import Trainer

__all__ = ["StateLayout", "StopRequest", "Stopped", "Timetable", "TrainState", "Trainer", "Window", "run_loop"]
