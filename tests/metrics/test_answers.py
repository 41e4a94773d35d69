import collections
import json
import re
import string
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x import metrics
from t5x._runtime.errors import UserError
from tests.support.paths import SHARED

SQUAD = SHARED / "squad_dev_v1.1/dev-v1.1.json.zip"
needs_squad = pytest.mark.skipif(not SQUAD.is_file(), reason="SQuAD (../shared/data/squad_dev_v1.1) is not here")


def _normal(answer: str) -> list[str]:
    kept = [letter for letter in answer.lower() if letter not in string.punctuation]
    return re.sub(r"\b(?:the|an|a)\b", " ", "".join(kept)).split()


def _reference(golds: list[list[str]], predictions: list[str], empty_is_an_answer: bool) -> tuple[float, float]:
    """Compute SQuAD's scores by definition, from precision and recall of the normalized words."""

    def f1(gold, prediction):
        gold, prediction = _normal(gold), _normal(prediction)
        if empty_is_an_answer and not (gold and prediction):
            return float(gold == prediction)
        remaining = collections.Counter(gold)
        same = 0
        for word in prediction:
            if remaining[word]:
                remaining[word] -= 1
                same += 1
        if same == 0:
            return 0.0
        precision, recall = same / len(prediction), same / len(gold)
        return 2 * precision * recall / (precision + recall)

    exact = sum(
        max(_normal(gold) == _normal(prediction) for gold in several)
        for several, prediction in zip(golds, predictions, strict=True)
    )
    partial = sum(
        max(f1(gold, prediction) for gold in several) for several, prediction in zip(golds, predictions, strict=True)
    )
    return 100 * exact / len(golds), 100 * partial / len(golds)


@pytest.fixture(scope="module")
def questions() -> tuple[list[list[str]], list[str]]:
    """Return all answers of SQuAD's questions, and one prediction each: right, modified or wrong."""
    with zipfile.ZipFile(SQUAD) as archive, archive.open("dev-v1.1.json") as file:
        articles = json.load(file)["data"]
    found = [qa for article in articles for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    golds = [[answer["text"] for answer in qa["answers"]] for qa in found]
    random = np.random.default_rng(0)
    changes = [
        lambda text: text,
        str.upper,
        lambda text: f"The {text}!",
        lambda text: text.replace(" ", "  , "),
        lambda text: " ".join(text.split()[:-1]),
        lambda text: f"{text} {text}",
        lambda text: " ".join(reversed(text.split())),
        lambda text: golds[random.integers(len(golds))][0],
        lambda text: "",
    ]
    return golds, [changes[random.integers(len(changes))](several[random.integers(len(several))]) for several in golds]


@needs_squad
def test_squad_equals_its_definition(questions):
    golds, predictions = questions
    assert len(golds) == 10570
    em, f1 = _reference(golds, predictions, empty_is_an_answer=False)
    assert 20 < em < f1 < 90
    assert metrics.squad(golds, predictions) == pytest.approx({"em": em, "f1": f1}, abs=1e-9)
    # One of these is ".", which has no word to be scored by.
    best = {"em": 100, "f1": 100 * 10569 / 10570}
    assert metrics.squad(golds, [several[-1] for several in golds]) == pytest.approx(best, abs=1e-9)


@needs_squad
def test_squad_2_equals_its_definition(questions):
    golds, predictions = (values[::4] for values in questions)
    golds = [several if index % 3 else [] for index, several in enumerate(golds)]
    filled = [[answer for answer in several if _normal(answer)] or [""] for several in golds]
    has_answer = np.array([bool(several) for several in golds])
    expected = {}
    for name, rows in (("", np.full(len(golds), True)), ("HasAns_", has_answer), ("NoAns_", ~has_answer)):
        chosen = [(several, text) for several, text, row in zip(filled, predictions, rows, strict=True) if row]
        em, f1 = _reference(*map(list, zip(*chosen, strict=True)), empty_is_an_answer=True)
        expected |= {f"{name}em": em, f"{name}f1": f1}
    assert metrics.squad_v2(golds, predictions) == pytest.approx(expected, abs=1e-9)
    assert metrics.squad_v2(filled, predictions) == pytest.approx(expected, abs=1e-9)


def test_empty_answers():
    # In SQuAD 1.1 an empty prediction has no word in common with any answer; in 2.0 it means that there is none.
    assert metrics.squad([["a"]], [""]) == {"em": 100.0, "f1": 0.0}
    assert metrics.squad_v2([[], ["a"]], ["", ""])["f1"] == 100.0
    assert metrics.squad_v2([[], "", ["x"]], ["x", "", ""]) == pytest.approx(
        {"em": 100 / 3, "f1": 100 / 3, "HasAns_em": 0, "HasAns_f1": 0, "NoAns_em": 50, "NoAns_f1": 50}
    )
    assert set(metrics.squad_v2(["x"], ["x"])) == {"em", "f1", "HasAns_em", "HasAns_f1"}
    with pytest.raises(UserError, match=r"squad: targets\[1\].*squad_v2"):
        metrics.squad(["a", []], ["a", "b"])


def test_single_answers_and_arrays_of_answers():
    assert metrics.squad(["Eiffel Tower"], ["the eiffel tower"]) == {"em": 100.0, "f1": 100.0}
    assert metrics.squad([np.array(["x y", "z"], object)], ["y"]) == pytest.approx({"em": 0.0, "f1": 200 / 3})


def test_trivia_qa_splits_words_at_punctuation():
    assert metrics.trivia_qa([["rock and roll"]], ["Rock-and-roll"]) == {"em": 100.0, "f1": 100.0}
    assert metrics.squad([["rock and roll"]], ["Rock-and-roll"]) == {"em": 0.0, "f1": 0.0}
    assert metrics.trivia_qa([["the \u2018Beatles\u2019", "Beatles_band"]], ["Beatles"]) == {"em": 100.0, "f1": 100.0}
    assert metrics.trivia_qa([["w x y"], ["z"]], ["x_y", "a z"]) == pytest.approx({"em": 50.0, "f1": 90.0})


WORDS = st.lists(st.sampled_from(["the", "a", "cat", "Cat,", "dog", "é", "-", "sat"]), max_size=4).map(" ".join)
GOLDS = st.lists(st.sampled_from(["cat", "the dog", "Cat sat", "é"]), max_size=2)
ROW = st.tuples(GOLDS, WORDS, st.floats(0.01, 1))


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12, unique_by=lambda row: row[2]))
def test_the_best_threshold_of_squad_2(rows):
    """Try every threshold: predictions above it count as empty."""
    golds, predictions, probabilities = map(list, zip(*rows, strict=True))
    predictions = [text if _normal(text) else "" for text in predictions]
    filled = [several or [""] for several in golds]

    def at(threshold):
        kept = [text if p <= threshold else "" for text, p in zip(predictions, probabilities, strict=True)]
        return _reference(filled, kept, empty_is_an_answer=True)

    found = metrics.squad_v2(golds, predictions, probabilities)
    for column, name in enumerate(("em", "f1")):
        best = max(at(threshold)[column] for threshold in (0.0, *probabilities))
        assert found[f"best_{name}"] == pytest.approx(best)
        assert at(found[f"best_{name}_threshold"])[column] == pytest.approx(best)


def test_a_useless_threshold_is_0():
    found = metrics.squad_v2([[], ["cat"]], ["cat", "dog"], [0.1, 0.2])
    assert (found["best_em"], found["best_em_threshold"]) == (50.0, 0.0)
    found = metrics.squad_v2([[], ["cat"]], ["dog", "cat"], [0.9, 0.2])
    assert (found["em"], found["best_em"], found["best_f1_threshold"]) == (50.0, 100.0, 0.2)


ANY = st.text(st.sampled_from("aA theTHE.,'-_é\u00a0\t12東"), max_size=20)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(ANY, min_size=1, max_size=3), ANY), min_size=1, max_size=5))
def test_squad_of_any_strings(rows):
    golds, predictions = map(list, zip(*rows, strict=True))
    em, f1 = _reference(golds, predictions, empty_is_an_answer=False)
    assert metrics.squad(golds, predictions) == pytest.approx({"em": em, "f1": f1})


def test_probabilities_are_checked():
    with pytest.raises(UserError, match=r"squad_v2: 2 targets.* 1 no_answer_probabilities"):
        metrics.squad_v2(["a", "b"], ["a", "b"], [0.5])
    with pytest.raises(UserError, match=r"no_answer_probabilities .*'0.5'"):
        metrics.squad_v2(["a"], ["a"], ["0.5"])
