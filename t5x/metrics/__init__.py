"""Accumulators of a run, and what a task is scored with."""

from typing import Any

from t5x.metrics.text import accuracy, exact_match, sequence_accuracy

# Imported when first asked for: they need JAX, which modules that only define tasks do without.
_ACCUMULATORS = ("Average", "AveragePerStep", "Sum")

__all__ = ["Average", "AveragePerStep", "Sum", "accuracy", "exact_match", "sequence_accuracy"]


def __getattr__(name: str) -> Any:
    if name in _ACCUMULATORS:
        from t5x.metrics import accumulators

        return getattr(accumulators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
