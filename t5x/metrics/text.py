"""Equality and edit distance of predictions and targets. Scores are percentages (0-100), as T5 reports them.

Like all metrics of tasks, each function takes `(targets, predictions)`, two sequences of the same length, and returns
`{name: value}`.

    >>> accuracy(["yes", "no"], ["yes", "yes"])
    {'accuracy': 50.0}
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5x.metrics.checks import check_pairs, strings


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Return the percentage of predictions that equal their target, of any type (strings, labels, numbers, arrays)."""
    return _percent_equal("accuracy", targets, predictions)


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Return the percentage of predictions that are exactly their target."""
    return _percent_equal("exact_match", targets, predictions)


def sequence_accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Return the percentage of predicted sequences (of tokens or labels) that are right at every position."""
    return _percent_equal("sequence_accuracy", targets, predictions)


def edit_distance(targets: Sequence[str], predictions: Sequence[str], lower: bool = True) -> dict[str, float]:
    """Count the words to insert, delete or replace to turn a prediction into its target.

    As in T5, every non-word character separates words, so that two of them in a row have an empty word between them.

    Args:
      targets: strings.
      predictions: strings.
      lower: whether to ignore case.

    Returns:
      "min_edit", "max_edit", "mean_edit", "median_edit" and "sum_edit" over the examples, in words, not percent.
    """
    metric = "edit_distance"
    check_pairs(metric, targets, predictions)

    def words(text: str) -> list[str]:
        return re.split(r"\W", text.lower() if lower else text)

    pairs = zip(strings(metric, "targets", targets), strings(metric, "predictions", predictions), strict=True)
    edits = np.array([_levenshtein(words(target), words(prediction)) for target, prediction in pairs])
    reductions: dict[str, Callable[[np.ndarray], np.floating]] = {
        "min": np.min, "max": np.max, "mean": np.mean, "median": np.median, "sum": np.sum,
    }  # fmt: skip
    return {f"{name}_edit": float(reduce(edits)) for name, reduce in reductions.items()}


def _percent_equal(metric: str, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    check_pairs(metric, targets, predictions)
    equal = sum(np.array_equal(target, prediction) for target, prediction in zip(targets, predictions, strict=True))
    return {metric: 100.0 * equal / len(targets)}


def _levenshtein(a: Sequence[str], b: Sequence[str]) -> int:
    columns = np.arange(len(b) + 1)
    ids = {word: number for number, word in enumerate(dict.fromkeys([*a, *b]))}
    b_ids = np.array([ids[word] for word in b])
    distances = columns
    for row, word in enumerate(a, start=1):
        best = np.concatenate([[row], np.minimum(distances[1:] + 1, distances[:-1] + (b_ids != ids[word]))])
        # An insertion costs 1 per column: the minimum over all columns to the left of their distance plus that cost.
        distances = np.minimum.accumulate(best - columns) + columns
    return int(distances[-1])
