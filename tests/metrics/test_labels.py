import itertools
import math

import numpy as np
import pytest
import scipy.stats

from t5x import metrics
from t5x._runtime.errors import UserError


def _f1(targets, predictions, label):
    pairs = list(zip(targets, predictions, strict=True))
    both = pairs.count((label, label))
    predicted, actual = sum(p == label for _, p in pairs), sum(t == label for t, _ in pairs)
    if both == 0:
        return 0.0
    precision, recall = both / predicted, both / actual
    return 100 * 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("seed", range(20))
def test_f1_scores(seed):
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 15))
    targets = random.integers(0, 2, size).tolist()
    predictions = random.integers(-1, 4, size).tolist()
    wrong_if_invalid = [p if p in (0, 1) else 1 - t for t, p in zip(targets, predictions, strict=True)]
    expected = _f1(targets, wrong_if_invalid, 1)
    assert metrics.f1_score_with_invalid(targets, predictions)["f1"] == pytest.approx(expected)
    as_arrays = metrics.f1_score_with_invalid(np.array(targets, bool), np.array(predictions))
    assert as_arrays["f1"] == pytest.approx(expected)
    expected = np.mean([_f1(targets, predictions, label) for label in range(3)])
    assert metrics.mean_multiclass_f1(3)(targets, predictions) == pytest.approx({"mean_3class_f1": expected})


def test_predictions_are_not_changed():
    predictions = np.array([1, 7, 0])
    metrics.f1_score_with_invalid([1, 1, 0], predictions)
    assert predictions.tolist() == [1, 7, 0]


@pytest.mark.parametrize("seed", range(20))
def test_matthews_correlation_is_that_of_class_indicators(seed):
    random = np.random.default_rng(seed)
    targets, predictions = random.integers(0, 3, (2, 12))
    indicator = lambda labels: (labels[:, None] == np.arange(3)).astype(float)
    t, p = (rows - rows.mean(axis=0) for rows in (indicator(targets), indicator(predictions)))
    expected = 100 * (t * p).sum() / math.sqrt((t * t).sum() * (p * p).sum())
    assert metrics.matthews_corrcoef(targets, predictions) == pytest.approx({"matthews_corrcoef": expected})
    names = lambda labels: ["abc"[label] for label in labels]
    assert metrics.matthews_corrcoef(names(targets), names(predictions))["matthews_corrcoef"] == pytest.approx(expected)


def test_correlation_with_one_class():
    assert metrics.matthews_corrcoef([0, 1], [1, 1]) == {"matthews_corrcoef": 0.0}
    with pytest.raises(UserError, match=r"matthews_corrcoef: .*numbers or strings"):
        metrics.matthews_corrcoef([[1]], [[1]])


@pytest.mark.parametrize("seed", range(10))
def test_correlations(seed):
    random = np.random.default_rng(seed)
    targets, predictions = random.integers(0, 5, 20), random.normal(size=20).round(1)
    expected = 100 * scipy.stats.pearsonr(targets, predictions).statistic
    assert metrics.pearson_corrcoef(targets, predictions) == pytest.approx({"pearson_corrcoef": expected})
    expected = 100 * scipy.stats.spearmanr(targets, predictions).statistic
    assert metrics.spearman_corrcoef(targets, predictions) == pytest.approx({"spearman_corrcoef": expected})


@pytest.mark.parametrize("name", ["pearson_corrcoef", "spearman_corrcoef"])
@pytest.mark.filterwarnings("error")
def test_undefined_correlations(name):
    metric = getattr(metrics, name)
    assert math.isnan(metric([1, 2, 3], [2.0, 2.0, 2.0])[name])
    assert math.isnan(metric([1, 2, 3], [2.0, float("nan"), 4.0])[name])
    with pytest.raises(UserError, match=f"{name}: .*two examples"):
        metric([1], [1])


@pytest.mark.parametrize(
    "metric", [metrics.f1_score_with_invalid, metrics.mean_multiclass_f1(3), metrics.pearson_corrcoef, metrics.auc]
)
def test_metrics_of_numbers_reject_strings(metric):
    with pytest.raises(UserError, match=r"predictions .*'positive' \(str\).*postprocess_fn"):
        metric([1, 0, 1], [1, "positive", 0])
    with pytest.raises(UserError, match=r"targets .*None \(NoneType\)"):
        metric([1, None, 1], [1, 0, 0])


def test_targets_must_be_binary():
    with pytest.raises(UserError, match=r"f1_score_with_invalid: targets .*0 or 1.* 2"):
        metrics.f1_score_with_invalid([0, 2], [0, 1])
    with pytest.raises(UserError, match=r"auc: targets .*0 or 1.* 0\.5"):
        metrics.auc([0, 0.5], [0, 1])


def _areas(targets, scores):
    """Return the share of pairs in the right order (ties count half), and the mean precision at relevant examples."""
    positive = [score for target, score in zip(targets, scores, strict=True) if target]
    negative = [score for target, score in zip(targets, scores, strict=True) if not target]
    pairs = list(itertools.product(positive, negative))
    roc = sum((p > n) + (p == n) / 2 for p, n in pairs) / len(pairs)
    precision = lambda level: sum(p >= level for p in positive) / sum(score >= level for score in scores)
    return {"auc-roc": roc, "auc-pr": sum(map(precision, positive)) / len(positive)}


@pytest.mark.parametrize("seed", range(20))
def test_areas_under_curves(seed):
    random = np.random.default_rng(seed)
    targets = [0, 1, *random.integers(0, 2, 10)]
    scores = random.integers(0, 6, 12) / 10
    expected = _areas(targets, scores)
    assert metrics.auc(targets, scores) == pytest.approx(expected)
    assert metrics.score_auc(targets, scores) == pytest.approx(expected)
    graded = [3.5 if target else 1.0 for target in targets]
    assert metrics.score_auc(graded, scores, targets_threshold=3.5) == pytest.approx(expected)


def test_areas_with_one_class():
    assert all(math.isnan(area) for area in metrics.auc([1, 1], [0.1, 0.2]).values())


def _choices(rights, weights=None, lengths=None):
    """Return targets of `rank_classification` for booleans [examples, choices]."""
    weight = lambda example: 1.0 if weights is None else weights[example]
    length = lambda choice: 1 if lengths is None else lengths[choice]
    return [
        ((example, choice), right, weight(example), length(choice))
        for example, of_example in enumerate(rights)
        for choice, right in enumerate(of_example)
    ]


def test_the_choice_with_the_highest_score_is_the_prediction():
    targets = _choices([[True, False], [False, True, False], [False, True]])
    scores = [-1.0, -2.0, -3.0, -1.0, -2.0, -0.5, -0.6]
    assert metrics.rank_classification(targets, scores) == pytest.approx({"accuracy": 200 / 3})
    backwards = metrics.rank_classification(targets[::-1], scores[::-1])
    assert backwards == pytest.approx({"accuracy": 200 / 3})
    weighted = _choices([[True, False], [False, True]], weights=[3.0, 1.0])
    assert metrics.rank_classification(weighted, [-1, -2, -1, -2]) == {"accuracy": 75.0}
    several_right = _choices([[True, True, False], [False, False, True]])
    found = metrics.rank_classification(several_right, [-2, -1, -3, -1, -2, -3], num_classes=3)
    assert found == {"accuracy": 50.0}


def test_scores_by_the_length_of_a_choice():
    targets = _choices([[False, True]], lengths=[2, 10])
    assert metrics.rank_classification(targets, [-4.0, -5.0]) == {"accuracy": 0.0}
    assert metrics.rank_classification(targets, [-4.0, -5.0], normalize_by_target_length=True) == {"accuracy": 100.0}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_classes", [2, 3])
def test_choices_as_classes(seed, num_classes):
    random = np.random.default_rng(seed)
    labels = [0, 1, *random.integers(0, num_classes, 8)]
    scores = random.normal(size=(10, num_classes))
    targets = _choices(np.eye(num_classes, dtype=bool)[labels])
    found = metrics.rank_classification(targets, scores.ravel(), num_classes=num_classes)
    predicted = scores.argmax(axis=1)
    assert found.pop("accuracy") == pytest.approx(100 * np.mean(predicted == labels))
    if num_classes == 2:
        odds = scores[:, 1] - scores[:, 0]
        expected = {name: 100 * area for name, area in _areas(labels, odds).items()} | {"f1": _f1(labels, predicted, 1)}
    else:
        expected = {"mean_3class_f1": np.mean([_f1(labels, predicted, label) for label in range(3)])}
    assert found == pytest.approx(expected)


def test_invalid_choices_are_rejected():
    with pytest.raises(UserError, match=r"\(\(example, choice\), is_correct, weight, length\).* 1"):
        metrics.rank_classification([1, 0], [0.1, 0.2])
    with pytest.raises(UserError, match=r"example 0 .* 2 choices.*num_classes=3"):
        metrics.rank_classification(_choices([[True, False]]), [1, 2], num_classes=3)
