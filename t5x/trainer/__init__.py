"""The trainer: its state, one step, the loop around it, and evaluation during training."""

from t5x._runtime.imports import lazy_attributes

# Inference needs only the state, without optimizers and the training loop.
_MODULES = {
    "actions": ("ActionMode", "BaseAction", "EarlyStoppingAction", "TerminateOnNanAction"),
    "loop": ("Timetable", "run_loop"),
    "signals": ("Interrupted", "StopRequest", "Stopped"),
    "state_layout": ("StateLayout", "TrainState"),
    "step": ("accumulate_grads_microbatched", "apply_grads", "eval_step", "train_with_lr", "WeightMetricsComputer"),
    "metrics_manager": ("MetricsManager",),
    "t5x_api": (
        "ActionMapType", "ArrayMapFuture", "BaseTrainerConstructor", "LearningRateCallable", "MetricValueMapFuture",
        "MetricValueMapType", "PartitionedEvalCallable", "PartitionedTrainCallable", "PreemptionError",
        "SummarizeMetricsCallable", "TimeFuture", "merge_metrics",
    ),
    "trainer": ("BaseTrainer", "Trainer"),
}  # fmt: skip
__all__ = sorted(name for names in _MODULES.values() for name in names)
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
