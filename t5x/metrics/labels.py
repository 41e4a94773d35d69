"""Scores of classes and numbers, in percent as T5 reports them, except for the areas of `auc`, which are from 0 to 1.

>>> f1_score_with_invalid([1, 1, 1, 1, 0], [1, 1, 1, 7, 5])
{'f1': 75.0}
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.metrics.checks import check_pairs, number_pairs, numbers

Metric = Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]


def f1_score_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Compute the F1 of class 1; a prediction other than 0 and 1 counts as the wrong class.

    Args:
      targets: 0 or 1, or booleans.
      predictions: any numbers.
    """
    actual, predicted = number_pairs("f1_score_with_invalid", targets, predictions)
    _check_binary("f1_score_with_invalid", actual)
    predicted = np.where((predicted == 0) | (predicted == 1), predicted, 1 - actual)
    return {"f1": 100.0 * _f1(actual, predicted)}


def mean_multiclass_f1(num_classes: int) -> Metric:
    """Return a metric: the mean F1 of classes 0 … num_classes - 1, named e.g. "mean_3class_f1".

    The F1 of a class that is neither a target nor predicted is 0. In a gin file: `@metrics.mean_multiclass_f1()`, with
    `metrics.mean_multiclass_f1.num_classes = 3`.
    """

    def metric(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
        actual, predicted = number_pairs("mean_multiclass_f1", targets, predictions)
        scores = [_f1(actual == label, predicted == label) for label in range(num_classes)]
        return {f"mean_{num_classes}class_f1": 100.0 * float(np.mean(scores))}

    return metric


def matthews_corrcoef(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Compute the Matthews correlation of classes (numbers or strings); 0 if either side has only one class."""
    check_pairs("matthews_corrcoef", targets, predictions)
    try:
        actual, predicted = Counter(targets), Counter(predictions)
    except TypeError as error:
        raise UserError("matthews_corrcoef: targets and predictions must be classes: numbers or strings.") from error
    total = len(targets)
    correct = sum(target == prediction for target, prediction in zip(targets, predictions, strict=True))

    def covariance(a: Counter[Any], b: Counter[Any]) -> int:
        return sum(count * b[label] for label, count in a.items())

    spread = (total**2 - covariance(actual, actual)) * (total**2 - covariance(predicted, predicted))
    correlation = (correct * total - covariance(actual, predicted)) / np.sqrt(float(spread)) if spread else 0.0
    return {"matthews_corrcoef": 100.0 * float(correlation)}


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Compute the Pearson correlation; NaN if it is undefined: one side is constant, or a number is not finite."""
    return _correlation("pearson_corrcoef", targets, predictions, ranks=False)


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Compute the Spearman correlation, which is the Pearson correlation of the ranks; NaN if it is undefined."""
    return _correlation("spearman_corrcoef", targets, predictions, ranks=True)


def auc(
    targets: Sequence[float], predictions: Sequence[float], targets_threshold: float | None = None
) -> dict[str, float]:
    """Compute the areas under the ROC curve, "auc-roc", and the precision-recall curve, "auc-pr", from 0 to 1.

    Args:
      targets: 0 or 1; with a threshold, any numbers.
      predictions: higher for class 1.
      targets_threshold: minimum target of class 1.
    """
    return _areas("auc", targets, predictions, "predictions", targets_threshold)


def score_auc(
    targets: Sequence[float], scores: Sequence[float], targets_threshold: float | None = None
) -> dict[str, float]:
    """Compute `auc` of the model's scores of the targets."""
    return _areas("score_auc", targets, scores, "scores", targets_threshold)


def rank_classification(
    targets: Sequence[tuple[Sequence[int], bool, float, int]],
    scores: Sequence[float],
    num_classes: int | None = None,
    normalize_by_target_length: bool = False,
) -> dict[str, float]:
    """Score predictions that are the highest-scored choice of each example.

    Args:
      targets: ((example, choice), is correct, weight of the example, number of tokens) of every choice, as T5's
        `rank_classification` postprocessor returns them.
      scores: log likelihood of every choice.
      num_classes: number of choices of every example; None if it differs.
      normalize_by_target_length: divide scores by the number of tokens.

    Returns:
      "accuracy"; with `num_classes` and at most one correct choice per example also "mean_<n>class_f1" or, for two
      classes, "f1", "auc-roc" and "auc-pr" of choice 1. All in percent.

    Raises:
      UserError: if a target does not have this form, or an example has another number of choices.
    """
    check_pairs("rank_classification", targets, scores, "scores")
    values = numbers("rank_classification", "scores", scores)
    choices: dict[Any, list[tuple[int, bool, float, float]]] = {}
    for target, score in zip(targets, values, strict=True):
        try:
            (example, choice), right, weight, length = target
        except (TypeError, ValueError) as error:
            raise UserError(
                "rank_classification: a target must be ((example, choice), is_correct, weight, length), as the "
                f"postprocessor of this name returns it, not {str(target)[:80]}"
            ) from error
        score = score / length if normalize_by_target_length else score
        choices.setdefault(example, []).append((choice, bool(right), float(weight), float(score)))
    for example, options in choices.items():
        if num_classes is not None and len(options) != num_classes:
            raise UserError(
                f"rank_classification: example {example} has {len(options)} choices, not {num_classes=}; unset it."
            )
    sorted_choices = [sorted(options, key=lambda one: one[0]) for options in choices.values()]
    best = [int(np.argmax([score for *_, score in options])) for options in sorted_choices]
    chosen = [options[index] for options, index in zip(sorted_choices, best, strict=True)]
    results = {"accuracy": 100.0 * float(np.average([c[1] for c in chosen], weights=[c[2] for c in chosen]))}
    if num_classes is None:
        return results
    is_right, weights, logs = (np.array([[one[i] for one in several] for several in sorted_choices]) for i in (1, 2, 3))
    if (is_right.sum(axis=1) > 1).any():
        return results
    predicted = np.eye(num_classes, dtype=bool)[best]
    f1 = [_f1(is_right[:, label], predicted[:, label], weights[:, 0]) for label in range(num_classes)]
    if num_classes != 2:
        return results | {f"mean_{num_classes}class_f1": 100.0 * float(np.mean(f1))}
    areas = _curves(is_right[:, 1], logs[:, 1] - logs[:, 0], weights[:, 0])
    return results | {"f1": 100.0 * f1[1]} | {name: 100.0 * area for name, area in areas.items()}


def _check_binary(metric: str, targets: np.ndarray) -> None:
    if len(wrong := targets[(targets != 0) & (targets != 1)]):
        raise UserError(f"{metric}: targets must be 0 or 1, but one is {wrong[0]:g}.")


def _f1(actual: np.ndarray, predicted: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    both = (weights * (actual * predicted)).sum()
    total = (weights * actual).sum() + (weights * predicted).sum()
    return float(2.0 * both / total) if total else 0.0


def _correlation(metric: str, targets: Sequence[float], predictions: Sequence[float], ranks: bool) -> dict[str, float]:
    one, other = number_pairs(metric, targets, predictions)
    if len(one) < 2:
        raise UserError(f"{metric}: a correlation needs at least two examples.")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return {metric: float("nan")}
    if ranks:
        from scipy.stats import rankdata  # here, because the import is slow

        one, other = rankdata(one), rankdata(other)
    constant = np.ptp(one) == 0 or np.ptp(other) == 0
    return {metric: float("nan") if constant else 100.0 * float(np.corrcoef(one, other)[0, 1])}


def _areas(
    metric: str, targets: Sequence[float], scores: Sequence[float], kind: str, threshold: float | None
) -> dict[str, float]:
    actual, values = number_pairs(metric, targets, scores, kind)
    if threshold is None:
        _check_binary(metric, actual)
    return _curves(actual >= (1 if threshold is None else threshold), values, np.ones(len(actual)))


def _curves(actual: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Return the areas under the ROC curve (trapezoids) and the precision-recall curve (steps); NaN for one class."""
    order = np.argsort(-scores, kind="stable")
    last_of_ties = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum((weights * actual)[order])[last_of_ties]
    misses = np.cumsum((weights * ~actual)[order])[last_of_ties]
    if not (hits[-1] and misses[-1]):
        return {"auc-roc": float("nan"), "auc-pr": float("nan")}
    recall = np.append(0.0, hits / hits[-1])
    roc = np.trapezoid(recall, np.append(0.0, misses / misses[-1]))
    pr = (np.diff(recall) * hits / (hits + misses)).sum()
    return {"auc-roc": float(roc), "auc-pr": float(pr)}
