"""Scores of predictions against targets, in percent (0-100) as T5 reports them.

Each function takes `(targets, predictions)`, two sequences of equal length, and returns `{name: value}`: the form of a
task's metric function.

    >>> accuracy(["yes", "no"], ["yes", "yes"])
    {'accuracy': 50.0}
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x.errors import UserError


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The share of predictions that equal their target, of whatever type (strings, labels, numbers, arrays)."""
    return {"accuracy": _percent_equal("accuracy", targets, predictions)}


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The share of predictions that are exactly their target."""
    return {"exact_match": _percent_equal("exact_match", targets, predictions)}


def sequence_accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The share of predicted sequences (of tokens, of labels) that are right at every position."""
    return {"sequence_accuracy": _percent_equal("sequence_accuracy", targets, predictions)}


def _percent_equal(metric: str, targets: Sequence[Any], predictions: Sequence[Any]) -> float:
    if len(targets) != len(predictions):
        raise UserError(f"{metric}: {len(targets)} targets but {len(predictions)} predictions; one of each is needed.")
    if len(targets) == 0:
        raise UserError(f"{metric}: there are no examples to score; the evaluation split is empty.")
    equal = sum(np.array_equal(target, prediction) for target, prediction in zip(targets, predictions, strict=True))
    return 100.0 * equal / len(targets)
