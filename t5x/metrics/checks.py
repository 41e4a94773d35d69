"""What every metric asks of its arguments; what does not fit is a UserError that names the metric."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x.errors import UserError


def check_pairs(metric: str, targets: Any, inferences: Any, kind: str = "predictions") -> None:
    """Both are lists (or the like) of the same length, and not empty; `kind` is what the second one holds."""
    for what, values in (("targets", targets), (kind, inferences)):
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            raise UserError(f"{metric}: {what} must be a list with one for each example, not {type(values).__name__}.")
    if len(targets) != len(inferences):
        raise UserError(f"{metric}: {len(targets)} targets but {len(inferences)} {kind}; one of each is needed.")
    if len(targets) == 0:
        raise UserError(f"{metric}: there are no examples to score; the evaluation split is empty.")


def texts(metric: str, what: str, values: Sequence[Any]) -> list[str]:
    """`values`, of which each must be a text."""
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise _not_text(metric, f"{what}[{index}]", value, "a text")
    return list(values)


def references(metric: str, targets: Sequence[Any]) -> list[list[str]]:
    """`targets`, of which each must be a text or a list of texts, as lists."""
    found = []
    for index, target in enumerate(targets):
        several = [target] if isinstance(target, str) else target
        if not isinstance(several, list | tuple | np.ndarray):
            raise _not_text(metric, f"targets[{index}]", target, "a text or a list of texts")
        found.append(texts(metric, f"targets[{index}]", several))
    return found


def numbers(metric: str, what: str, values: Any) -> np.ndarray:
    """`values`, of which each must be a number or a truth value: float64 [examples]."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        wrong = next((v for v in values if not isinstance(v, bool | int | float | np.number | np.bool_)), values)
        raise UserError(
            f"{metric}: {what} must be numbers, one for each example, but there is {_shown(wrong)}. Let the task's "
            "postprocess_fn turn texts into numbers."
        )
    return array.astype(np.float64)


def _not_text(metric: str, where: str, value: Any, needed: str) -> UserError:
    hint = " Decode bytes first." if isinstance(value, bytes) else ""
    return UserError(f"{metric}: {where} must be {needed}, but it is {_shown(value)}.{hint}")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"
