"""Exact match and word F1 of answers to questions, in percent, as the official evaluation scripts compute them.

>>> squad([["the Eiffel Tower", "Eiffel Tower"]], ["eiffel tower."])
{'em': 100.0, 'f1': 100.0}
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.metrics.checks import check_pairs, numbers, references, strings

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE = str.maketrans("", "", string.punctuation)
_BLANK = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4", " "))

Targets = Sequence[str | Sequence[str]]


def squad(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """Compute "em" and "f1" of SQuAD 1.1, the maximum over the answers of each question.

    Case, punctuation, articles and whitespace are ignored.

    Args:
      targets: the answers of each question, or its only answer.
      predictions: one answer per question.

    Raises:
      UserError: if the arguments are not answers, or a question has none.
    """
    return _mean(_scores("squad", targets, predictions, _normalize_squad))


def trivia_qa(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """Compute "em" and "f1" of TriviaQA: like `squad`, but punctuation and more kinds of quotes separate words."""
    return _mean(_scores("trivia_qa", targets, predictions, _normalize_trivia_qa))


def squad_v2(
    targets: Targets, predictions: Sequence[str], no_answer_probabilities: Sequence[float] | None = None
) -> dict[str, float]:
    """Compute SQuAD 2.0: like `squad`, with unanswerable questions, whose only right prediction is the empty string.

    Args:
      targets: the answers of each question, or its only answer; an empty list or string if it has no answer.
      predictions: one answer per question; the empty string means that there is none.
      no_answer_probabilities: probability of each question to have no answer.

    Returns:
      "em" and "f1" of all questions, and of those with and without an answer, if any: "HasAns_em", "HasAns_f1",
      "NoAns_em" and "NoAns_f1". With probabilities also "best_em" and "best_f1", the scores if predictions above the
      best threshold count as empty, and the thresholds, "best_em_threshold" and "best_f1_threshold".
    """
    check_pairs("squad_v2", targets, predictions)
    answers = references("squad_v2", targets)
    # As in the official script, an answer of only articles and punctuation counts as no answer.
    golds = [[answer for answer in several if _normalize_squad(answer)] or [""] for several in answers]
    scores = _scores("squad_v2", golds, predictions, _normalize_squad, both_empty=1.0)
    answerable = np.array([any(several) for several in answers])
    metrics = _mean(scores)
    for name, rows in (("HasAns", scores[answerable]), ("NoAns", scores[~answerable])):
        if len(rows):
            metrics |= {f"{name}_{key}": value for key, value in _mean(rows).items()}
    if no_answer_probabilities is not None:
        check_pairs("squad_v2", targets, no_answer_probabilities, "no_answer_probabilities")
        probabilities = numbers("squad_v2", "no_answer_probabilities", no_answer_probabilities)
        claims = np.array([bool(text) for text in predictions])
        for name, of_questions in zip(("em", "f1"), scores.T, strict=True):
            gains = np.where(answerable, of_questions, -1.0 * claims)
            metrics |= _best_threshold(f"best_{name}", gains, probabilities, int((~answerable).sum()))
    return metrics


def _best_threshold(name: str, gains: np.ndarray, probabilities: np.ndarray, at_0: int) -> dict[str, float]:
    """Return the best score of any threshold, and the lowest threshold that reaches it.

    Args:
      name: name of the score.
      gains: difference of each question's score between its prediction and the empty string.
      probabilities: probability of each question to have no answer.
      at_0: the score if all predictions count as empty.
    """
    order = np.argsort(probabilities, kind="stable")
    scores = np.cumsum([at_0, *gains[order]])
    best = int(scores.argmax())
    threshold = [0.0, *probabilities[order]][best]
    return {name: float(100.0 * scores[best] / len(gains)), f"{name}_threshold": float(threshold)}


def _scores(
    metric: str, targets: Targets, predictions: Sequence[str], normalize: Callable[[str], str], both_empty: float = 0.0
) -> np.ndarray:
    """Return exact match and F1, from 0 to 1, of each question: [questions, 2].

    Args:
      metric, targets, predictions: see `squad`.
      normalize: applied to answers before they are compared.
      both_empty: F1 of two answers without words.
    """
    check_pairs(metric, targets, predictions)
    answers = references(metric, targets)
    scores = np.zeros((len(answers), 2))
    for index, (several, text) in enumerate(zip(answers, strings(metric, "predictions", predictions), strict=True)):
        if not several:
            hint = " Use squad_v2 for questions without an answer." if metric == "squad" else ""
            raise UserError(f"{metric}: targets[{index}] has no answer.{hint}")
        prediction = normalize(text)
        golds = [normalize(answer) for answer in several]
        scores[index] = prediction in golds, max(_word_f1(gold, prediction, both_empty) for gold in golds)
    return scores


def _mean(scores: np.ndarray) -> dict[str, float]:
    em, f1 = 100.0 * scores.mean(axis=0)
    return {"em": float(em), "f1": float(f1)}


def _normalize_squad(text: str, punctuation: Mapping[int, str | int | None] = _DELETE) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(punctuation)).split())


def _normalize_trivia_qa(text: str) -> str:
    return _normalize_squad(text, _BLANK)


def _word_f1(target: str, prediction: str, both_empty: float) -> float:
    one, other = Counter(target.split()), Counter(prediction.split())
    if not one and not other:
        return both_empty
    return 2.0 * (one & other).total() / (one.total() + other.total())


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
