"""Scores of predictions against targets, in percent (0-100) as T5 reports them.

Each function takes `(targets, predictions)`, two sequences of equal length, and returns `{name: value}`: the form of a
task's metric function.

    >>> accuracy(["yes", "no"], ["yes", "yes"])
    {'accuracy': 50.0}
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x.metrics.checks import check_pairs, texts


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The share of predictions that equal their target, of whatever type (strings, labels, numbers, arrays)."""
    return {"accuracy": _percent_equal("accuracy", targets, predictions)}


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The share of predictions that are exactly their target."""
    return {"exact_match": _percent_equal("exact_match", targets, predictions)}


def sequence_accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The share of predicted sequences (of tokens, of labels) that are right at every position."""
    return {"sequence_accuracy": _percent_equal("sequence_accuracy", targets, predictions)}


def edit_distance(targets: Sequence[str], predictions: Sequence[str], lower: bool = True) -> dict[str, float]:
    """How many words must be put in, taken out or replaced to get from a prediction to its target.

    These are numbers of words, not percent. As in T5, every character that is not of a word divides, so that two of
    them in a row have an empty word between them.

    Args:
      targets, predictions: texts.
      lower: whether capitals do not count.

    Returns:
      "min_edit", "max_edit", "mean_edit", "median_edit" and "sum_edit" over the examples.
    """
    check_pairs("edit_distance", targets, predictions)
    words = lambda text: re.split(r"\W", text.lower() if lower else text)
    pairs = zip(
        texts("edit_distance", "targets", targets), texts("edit_distance", "predictions", predictions), strict=True
    )
    edits = np.array([_levenshtein(words(target), words(prediction)) for target, prediction in pairs])
    return {
        "min_edit": float(edits.min()),
        "max_edit": float(edits.max()),
        "mean_edit": float(edits.mean()),
        "median_edit": float(np.median(edits)),
        "sum_edit": float(edits.sum()),
    }


def _percent_equal(metric: str, targets: Sequence[Any], predictions: Sequence[Any]) -> float:
    check_pairs(metric, targets, predictions)
    equal = sum(np.array_equal(target, prediction) for target, prediction in zip(targets, predictions, strict=True))
    return 100.0 * equal / len(targets)


def _levenshtein(a: Sequence[str], b: Sequence[str]) -> int:
    columns = np.arange(len(b) + 1)
    ids = {word: number for number, word in enumerate(dict.fromkeys([*a, *b]))}
    b_ids = np.array([ids[word] for word in b])
    distances = columns
    for row, word in enumerate(a, start=1):
        best = np.concatenate([[row], np.minimum(distances[1:] + 1, distances[:-1] + (b_ids != ids[word]))])
        # One more column costs at most one more: the minimum over all columns to the left, each with its way to here.
        distances = np.minimum.accumulate(best - columns) + columns
    return int(distances[-1])
