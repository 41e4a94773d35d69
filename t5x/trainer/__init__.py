"""The trainer: its state, one step, the loop around it, and evaluation during training."""

from t5x._runtime.imports import lazy_attributes

# Inference needs only the state, without optimizers and the training loop.
_MODULES = {
    "actions": ("ActionMapType", "ActionMode", "BaseAction", "EarlyStoppingAction", "TerminateOnNanAction"),
    "loop": ("Timetable", "run_loop"),
    "signals": ("Interrupted", "PreemptionError", "StopRequest", "Stopped"),
    "state_layout": ("StateLayout", "TrainState"),
    "step": ("accumulate_grads_microbatched", "apply_grads", "eval_step", "train_with_lr", "WeightMetricsComputer"),
    "trainer": (
        "ArrayMapFuture", "BaseTrainer", "BaseTrainerConstructor", "LearningRateCallable", "MetricsManager",
        "MetricValueMapFuture", "MetricValueMapType", "PartitionedEvalCallable", "PartitionedTrainCallable",
        "SummarizeMetricsCallable", "TimeFuture", "Trainer", "merge_metrics",
    ),
}  # fmt: skip
__all__ = sorted(name for names in _MODULES.values() for name in names)
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
