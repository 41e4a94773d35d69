"""The trainer: its state, one step, the loop around it, and evaluation during training."""

from t5x.lazy_imports import lazy_attributes

# Inference needs only the state, without optimizers and the training loop.
_MODULES = {
    "actions": ("ActionMode", "BaseAction", "EarlyStoppingAction", "TerminateOnNanAction"),
    "loop": ("Timetable", "run_loop"),
    "signals": ("Interrupted", "StopRequest", "Stopped"),
    "state": ("StateLayout", "TrainState"),
    "trainer": ("Trainer",),
    "weight_metrics": ("WeightMetricsComputer",),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
