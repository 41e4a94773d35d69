"""Scores of classes and numbers, in percent as T5 reports them (only the areas under curves of `auc` are from 0 to 1).

>>> f1_score_with_invalid([1, 1, 1, 1, 0], [1, 1, 1, 7, 5])
{'f1': 75.0}
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5x.errors import UserError
from t5x.metrics.checks import check_pairs, numbers

Metric = Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]


def f1_score_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """F1 of class 1; a prediction that is neither 0 nor 1 counts as the wrong one of them.

    Args:
      targets: 0 or 1 (or False and True).
      predictions: any numbers.
    """
    check_pairs("f1_score_with_invalid", targets, predictions)
    actual = _zero_or_one("f1_score_with_invalid", numbers("f1_score_with_invalid", "targets", targets))
    predicted = numbers("f1_score_with_invalid", "predictions", predictions)
    predicted = np.where((predicted == 0) | (predicted == 1), predicted, 1 - actual)
    return {"f1": 100.0 * _f1(actual, predicted)}


def mean_multiclass_f1(num_classes: int) -> Metric:
    """A metric: the mean of the F1 of classes 0 … num_classes - 1, as "mean_3class_f1" for three.

    A class that is neither a target nor predicted has F1 0. In a gin file: `@metrics.mean_multiclass_f1()`, with
    `metrics.mean_multiclass_f1.num_classes = 3`.
    """

    def metric(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
        check_pairs("mean_multiclass_f1", targets, predictions)
        actual = numbers("mean_multiclass_f1", "targets", targets)
        predicted = numbers("mean_multiclass_f1", "predictions", predictions)
        scores = [_f1(actual == label, predicted == label) for label in range(num_classes)]
        return {f"mean_{num_classes}class_f1": 100.0 * float(np.mean(scores))}

    return metric


def matthews_corrcoef(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Matthews' correlation of classes, which may be numbers or texts; 0 where either side has one class only."""
    check_pairs("matthews_corrcoef", targets, predictions)
    try:
        actual, predicted = Counter(targets), Counter(predictions)
    except TypeError as error:
        raise UserError("matthews_corrcoef: targets and predictions must be classes: numbers or texts.") from error
    total = len(targets)
    correct = sum(target == prediction for target, prediction in zip(targets, predictions, strict=True))
    covariance = lambda a, b: sum(count * b[label] for label, count in a.items())
    spread = (total**2 - covariance(actual, actual)) * (total**2 - covariance(predicted, predicted))
    found = (correct * total - covariance(actual, predicted)) / np.sqrt(float(spread)) if spread else 0.0
    return {"matthews_corrcoef": 100.0 * float(found)}


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Pearson's correlation of numbers; NaN where it is not defined: all equal on one side, or not all finite."""
    return {"pearson_corrcoef": _correlation("pearson_corrcoef", targets, predictions, ranks=False)}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Spearman's correlation: Pearson's of the ranks; NaN where it is not defined."""
    return {"spearman_corrcoef": _correlation("spearman_corrcoef", targets, predictions, ranks=True)}


def auc(
    targets: Sequence[float], predictions: Sequence[float], targets_threshold: float | None = None
) -> dict[str, float]:
    """The areas under the ROC curve, "auc-roc", and the precision-recall curve, "auc-pr", from 0 to 1.

    Args:
      targets: 0 or 1; with a threshold, any numbers.
      predictions: higher for class 1.
      targets_threshold: from which a target is of class 1.
    """
    return _areas("auc", targets, predictions, "predictions", targets_threshold)


def score_auc(
    targets: Sequence[float], scores: Sequence[float], targets_threshold: float | None = None
) -> dict[str, float]:
    """`auc` of the model's scores of the targets."""
    return _areas("score_auc", targets, scores, "scores", targets_threshold)


def rank_classification(
    targets: Sequence[tuple[Sequence[int], bool, float, int]],
    scores: Sequence[float],
    num_classes: int | None = None,
    normalize_by_target_length: bool = False,
) -> dict[str, float]:
    """Of each example's choices, each scored on its own, the one with the highest score is the prediction.

    Args:
      targets: ((example, choice), whether it is right, weight of the example, number of tokens) for each choice, as
        T5's `rank_classification` postprocessor gives them.
      scores: the model's log likelihood of each choice.
      num_classes: of every example; None where they differ.
      normalize_by_target_length: divide a score by the number of tokens.

    Returns:
      "accuracy"; with `num_classes`, and one right choice each, also "mean_<n>class_f1", or, of two classes, "f1",
      "auc-roc" and "auc-pr" of choice 1. All in percent.
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
                f"postprocessor of this name gives it, not {str(target)[:80]}"
            ) from error
        score = score / length if normalize_by_target_length else score
        choices.setdefault(example, []).append((choice, bool(right), float(weight), float(score)))
    for example, found in choices.items():
        if num_classes is not None and len(found) != num_classes:
            raise UserError(
                f"rank_classification: example {example} has {len(found)} choices, not num_classes={num_classes}. "
                "Leave num_classes out where their number differs."
            )
    sorted_choices = [sorted(found, key=lambda one: one[0]) for found in choices.values()]
    best = [int(np.argmax([score for *_, score in found])) for found in sorted_choices]
    chosen = [found[index] for found, index in zip(sorted_choices, best, strict=True)]
    found = {"accuracy": 100.0 * float(np.average([c[1] for c in chosen], weights=[c[2] for c in chosen]))}
    if num_classes is None:
        return found
    right = np.array([[one[1] for one in of_example] for of_example in sorted_choices])
    if (right.sum(axis=1) > 1).any():
        return found
    weights = np.array([of_example[0][2] for of_example in sorted_choices])
    logs = np.array([[one[3] for one in of_example] for of_example in sorted_choices])
    predicted = np.eye(num_classes, dtype=bool)[best]
    f1 = [_f1(right[:, label], predicted[:, label], weights) for label in range(num_classes)]
    if num_classes != 2:
        return found | {f"mean_{num_classes}class_f1": 100.0 * float(np.mean(f1))}
    areas = _curves(right[:, 1], logs[:, 1] - logs[:, 0], weights)
    return found | {"f1": 100.0 * f1[1]} | {name: 100.0 * area for name, area in areas.items()}


def _zero_or_one(metric: str, targets: np.ndarray) -> np.ndarray:
    wrong = targets[(targets != 0) & (targets != 1)]
    if len(wrong):
        raise UserError(f"{metric}: targets must be 0 or 1, but there is {wrong[0]:g}.")
    return targets


def _f1(actual: np.ndarray, predicted: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    both = (weights * (actual * predicted)).sum()
    total = (weights * actual).sum() + (weights * predicted).sum()
    return float(2.0 * both / total) if total else 0.0


def _correlation(metric: str, targets: Sequence[float], predictions: Sequence[float], ranks: bool) -> float:
    check_pairs(metric, targets, predictions)
    one, other = numbers(metric, "targets", targets), numbers(metric, "predictions", predictions)
    if len(one) < 2:
        raise UserError(f"{metric}: a correlation needs two examples or more.")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("nan")
    if ranks:
        from scipy.stats import rankdata  # where it is used: importing it takes a while

        one, other = rankdata(one), rankdata(other)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return 100.0 * float(np.corrcoef(one, other)[0, 1])


def _areas(
    metric: str, targets: Sequence[float], scores: Sequence[float], kind: str, threshold: float | None
) -> dict[str, float]:
    check_pairs(metric, targets, scores, kind)
    actual = numbers(metric, "targets", targets)
    actual = _zero_or_one(metric, actual) if threshold is None else actual >= threshold
    return _curves(actual.astype(bool), numbers(metric, kind, scores), np.ones(len(actual)))


def _curves(actual: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Areas under the ROC curve (by trapezoids) and the precision-recall curve (by steps); NaN with one class only."""
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
