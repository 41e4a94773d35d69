import inspect
import subprocess
import sys

import numpy as np
import pytest

from t5x import metrics
from t5x._runtime.errors import UserError


@pytest.mark.parametrize("name", ["accuracy", "exact_match", "sequence_accuracy"])
def test_percent_of_equal_pairs(name):
    metric = getattr(metrics, name)
    assert metric(["a", "b", "c", "d"], ["a", "B", "c ", "d"]) == {name: 50.0}
    assert metric(targets=[1], predictions=[1]) == {name: 100.0}
    assert metric(np.array([1, 2]), np.array([2, 1])) == {name: 0.0}
    assert type(metric(["a"], ["a"])[name]) is float


def test_pairs_may_be_sequences_of_different_lengths():
    targets = [[1, 2], np.array([3, 4]), [5, 6], "ab"]
    predictions = [[1, 2], [3, 4], [5, 6, 7], "ba"]
    assert metrics.sequence_accuracy(targets, predictions) == {"sequence_accuracy": 50.0}


def test_scoring_does_not_import_jax_and_accumulators_are_available():
    program = (
        "import sys; from t5x import data, metrics, telemetry\n"
        "import t5x.data.evaluator, t5x.examples.demo.dates, t5x.apps.ranking.ranking_files\n"
        "assert not {'jax', 'flax', 'tensorboardX', 'sacrebleu', 'scipy'} & set(sys.modules)\n"
        "assert metrics.Sum(1).merge(metrics.Sum(2)).compute() == 3"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", [name for name in metrics.TASK_METRICS if name != "mean_multiclass_f1"])
def test_every_metric_rejects_anything_but_lists_of_examples(name):
    metric = getattr(metrics, name)
    required = [p.name for p in inspect.signature(metric).parameters.values() if p.default is p.empty]
    assert required in (["targets", "predictions"], ["targets", "scores"])
    kind = required[1]
    with pytest.raises(UserError, match=f"{name}: 2 targets.* 1 {kind}"):
        metric(["a", "b"], ["a"])
    with pytest.raises(UserError, match=f"{name}: .*no examples"):
        metric([], [])
    with pytest.raises(UserError, match=f"{name}: targets .*list.* str"):
        metric("ab", ["a", "b"])
    with pytest.raises(UserError, match=f"{name}: {kind} .*list.*iterator"):
        metric(["a"], iter(["a"]))


@pytest.mark.parametrize("name", ["bleu", "chrf", "edit_distance", "rouge", "squad", "squad_v2", "trivia_qa"])
def test_metrics_of_strings_reject_other_types(name):
    metric = getattr(metrics, name)
    with pytest.raises(UserError, match=rf"{name}: predictions\[1\] .*3 \(int\)"):
        metric(["a", "b"], ["a", 3])
    with pytest.raises(UserError, match=rf"{name}: targets\[0\].*bytes.*Decode"):
        metric([b"a"], ["a"])


def _edits(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(_edits(a[1:], b) + 1, _edits(a, b[1:]) + 1, _edits(a[1:], b[1:]) + (a[0] != b[0]))


def test_edit_distance_is_the_minimum_number_of_edits():
    random = np.random.default_rng(0)
    text = lambda: " ".join(random.choice(["a", "b", "C"], random.integers(1, 6)))
    targets, predictions = zip(*((text(), text()) for _ in range(60)), strict=True)
    pairs = zip(targets, predictions, strict=True)
    edits = [_edits(target.lower().split(), prediction.lower().split()) for target, prediction in pairs]
    assert metrics.edit_distance(targets, predictions) == {
        "min_edit": min(edits),
        "max_edit": max(edits),
        "mean_edit": np.mean(edits),
        "median_edit": np.median(edits),
        "sum_edit": sum(edits),
    }
    assert metrics.edit_distance(["A b"], ["a b"], lower=False)["sum_edit"] == 1
    assert metrics.edit_distance(["a, b"], ["a b"])["sum_edit"] == 1  # the empty word after the comma


def test_a_gin_file_names_metrics(tmp_path):
    file = tmp_path / "task.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "from t5x import metrics\n"
        "import __main__ as script\n"
        "metrics.bleu.tokenizer = 'char'\n"
        "metrics.mean_multiclass_f1.num_classes = 3\n"
        "script.score.metric_fns = [@metrics.bleu, @metrics.mean_multiclass_f1(), @metrics.reranking]\n"
    )
    program = (
        "from t5x import configuration\n"
        "def score(metric_fns):\n"
        "    bleu, f1, reranking = metric_fns\n"
        "    assert bleu(['abcd'], ['abcd'])['bleu'] > 99.9\n"
        "    assert f1([0, 1, 2], [0, 1, 2]) == {'mean_3class_f1': 100.0}\n"
        "    assert reranking([('q', 'd', 1)], [0.5])['mrr@10'] == 1\n"
        "    print('scored')\n"
        f"configuration.parse(gin_files=[{str(file)!r}], bindings=[], entry_points={{'score': score}})\n"
        "configuration.configured(score)()\n"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "scored\n"
