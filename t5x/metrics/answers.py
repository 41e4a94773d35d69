"""Exact match and word F1 of answers to questions, in percent, as the data sets' own evaluation scripts compute them.

>>> squad([["the Eiffel Tower", "Eiffel Tower"]], ["eiffel tower."])
{'em': 100.0, 'f1': 100.0}
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from t5x.errors import UserError
from t5x.metrics.checks import check_pairs, numbers, references, texts

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE = str.maketrans("", "", string.punctuation)
_BLANK = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4", " "))

Targets = Sequence[str | Sequence[str]]


def squad(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """SQuAD 1.1: "em" and "f1", each the best over the answers of a question.

    Capitals, punctuation, articles and spaces do not count.

    Args:
      targets: the answers of each question (or its only answer).
      predictions: one answer each.
    """
    return _mean(_scores("squad", targets, predictions, _squad_form))


def trivia_qa(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """TriviaQA: as `squad`, but punctuation, and quotes of other kinds, divide words instead of vanishing."""
    return _mean(_scores("trivia_qa", targets, predictions, _trivia_qa_form))


def squad_v2(
    targets: Targets, predictions: Sequence[str], no_answer_probabilities: Sequence[float] | None = None
) -> dict[str, float]:
    """SQuAD 2.0: as `squad`, and questions without an answer, whose only right prediction is the empty text.

    Args:
      targets: the answers of each question (or its only answer); none, or the empty text, where it has no answer.
      predictions: one answer each; the empty text says that there is none.
      no_answer_probabilities: of each question, that it has none.

    Returns:
      "em" and "f1" of all; those of the questions with and without an answer, where there are any, as "HasAns_em",
      "HasAns_f1", "NoAns_em" and "NoAns_f1". With probabilities also "best_em", what it would be if the predictions
      above the best threshold were taken as none, and that threshold, "best_em_threshold"; so of f1.
    """
    check_pairs("squad_v2", targets, predictions)
    answers = references("squad_v2", targets)
    # As in the official script, an answer of nothing but articles and punctuation is none.
    golds = [[answer for answer in several if _squad_form(answer)] or [""] for several in answers]
    scores = _scores("squad_v2", golds, predictions, _squad_form, both_empty=1.0)
    answerable = np.array([any(several) for several in answers])
    found = _mean(scores)
    for name, rows in (("HasAns", scores[answerable]), ("NoAns", scores[~answerable])):
        if len(rows):
            found |= {f"{name}_{key}": value for key, value in _mean(rows).items()}
    if no_answer_probabilities is not None:
        check_pairs("squad_v2", targets, no_answer_probabilities, "no_answer_probabilities")
        probabilities = numbers("squad_v2", "no_answer_probabilities", no_answer_probabilities)
        claims = np.array([bool(text) for text in predictions])
        for name, of_questions in zip(("em", "f1"), scores.T, strict=True):
            gains = np.where(answerable, of_questions, -1.0 * claims)
            found |= _best(f"best_{name}", gains, probabilities, int((~answerable).sum()))
    return found


def _best(name: str, gains: np.ndarray, probabilities: np.ndarray, at_0: int) -> dict[str, float]:
    """The best score of any threshold and the least threshold that has it.

    Args:
      gains: what the score gains by taking the prediction of each question, not the empty text.
      at_0: the score where all are taken as without an answer.
    """
    order = np.argsort(probabilities, kind="stable")
    scores = np.cumsum([at_0, *gains[order]])
    thresholds = [0.0, *probabilities[order]]
    best = int(scores.argmax())
    return {name: float(100.0 * scores[best] / len(gains)), f"{name}_threshold": float(thresholds[best])}


def _scores(
    metric: str,
    targets: Targets,
    predictions: Sequence[str],
    form: Callable[[str], str],
    both_empty: float = 0.0,
) -> np.ndarray:
    """Exact match and F1 of each question, from 0 to 1: [questions, 2].

    Answers are compared in the `form` of a text; the F1 of two without words is `both_empty`.
    """
    check_pairs(metric, targets, predictions)
    answers = references(metric, targets)
    scores = np.zeros((len(answers), 2))
    for index, (several, text) in enumerate(zip(answers, texts(metric, "predictions", predictions), strict=True)):
        if not several:
            hint = " squad_v2 scores questions without an answer." if metric == "squad" else ""
            raise UserError(f"{metric}: targets[{index}] has no answer.{hint}")
        prediction = form(text)
        golds = [form(answer) for answer in several]
        scores[index] = prediction in golds, max(_word_f1(gold, prediction, both_empty) for gold in golds)
    return scores


def _mean(scores: np.ndarray) -> dict[str, float]:
    em, f1 = 100.0 * scores.mean(axis=0)
    return {"em": float(em), "f1": float(f1)}


def _squad_form(text: str) -> str:
    return _without_articles(text.lower().translate(_DELETE))


def _trivia_qa_form(text: str) -> str:
    return _without_articles(text.lower().translate(_BLANK))


def _without_articles(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text).split())


def _word_f1(target: str, prediction: str, both_empty: float) -> float:
    one, other = Counter(target.split()), Counter(prediction.split())
    if not one and not other:
        return both_empty
    return 2.0 * (one & other).total() / (one.total() + other.total())
