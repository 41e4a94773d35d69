"""Checks of the arguments of metrics. Errors are UserErrors that name the metric."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError, shorten


def check_pairs(metric: str, targets: Any, inferences: Any, kind: str = "predictions") -> None:
    """Raise a UserError unless both are lists (or similar) of the same length and not empty.

    Args:
      metric: name of the metric.
      targets: the first list.
      inferences: the second list.
      kind: what the second list holds, for messages.
    """
    for what, values in (("targets", targets), (kind, inferences)):
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            raise UserError(f"{metric}: {what} must be a list with one entry per example, not {type(values).__name__}.")
    if len(targets) != len(inferences):
        raise UserError(f"{metric}: {len(targets)} targets but {len(inferences)} {kind}; the numbers must be equal.")
    if len(targets) == 0:
        raise UserError(f"{metric}: there are no examples to score. Is the evaluation split empty?")


def strings(metric: str, what: str, values: Sequence[Any] | np.ndarray) -> list[str]:
    """Return `values` as a list, or raise a UserError if one is not a string."""
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise _not_string(metric, f"{what}[{index}]", value, "a string")
    return list(values)


def references(metric: str, targets: Sequence[Any]) -> list[list[str]]:
    """Return `targets`, each a string or a list of strings, as lists, or raise a UserError."""
    problems = []
    for index, target in enumerate(targets):
        several = [target] if isinstance(target, str) else target
        if not isinstance(several, list | tuple | np.ndarray):
            raise _not_string(metric, f"targets[{index}]", target, "a string or a list of strings")
        problems.append(strings(metric, f"targets[{index}]", several))
    return problems


def numbers(metric: str, what: str, values: Any) -> np.ndarray:
    """Return numbers or booleans as float64 [examples], or raise a UserError."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        wrong = next((v for v in values if not isinstance(v, bool | int | float | np.number | np.bool_)), values)
        raise UserError(
            f"{metric}: {what} must be numbers, one per example, but one is {_describe(wrong)}. Convert strings to "
            "numbers in the task's postprocess_fn."
        )
    return array.astype(np.float64)


def number_pairs(
    metric: str, targets: Any, inferences: Any, kind: str = "predictions"
) -> tuple[np.ndarray, np.ndarray]:
    """Check two lists of numbers, see `check_pairs`, and return them as float64 [examples]."""
    check_pairs(metric, targets, inferences, kind)
    return numbers(metric, "targets", targets), numbers(metric, kind, inferences)


def _not_string(metric: str, where: str, value: Any, needed: str) -> UserError:
    hint = " Decode bytes first." if isinstance(value, bytes) else ""
    return UserError(f"{metric}: {where} must be {needed}, but it is {_describe(value)}.{hint}")


def _describe(value: Any) -> str:
    return f"{shorten(value, 60)} ({type(value).__name__})"
