import subprocess
import sys

import numpy as np
import pytest

from t5x import metrics
from t5x.errors import UserError


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


@pytest.mark.parametrize("name", ["accuracy", "exact_match", "sequence_accuracy"])
def test_what_cannot_be_scored(name):
    metric = getattr(metrics, name)
    with pytest.raises(UserError, match=f"{name}: 2 targets but 1 predictions"):
        metric(["a", "b"], ["a"])
    with pytest.raises(UserError, match=f"{name}: there are no examples"):
        metric([], [])


def test_scoring_does_not_import_jax_and_the_accumulators_are_there():
    program = (
        "import sys; from t5x import data, metrics, telemetry; import t5x.data.evaluation, t5x.examples.demo.dates\n"
        "assert not {'jax', 'flax', 'tensorboardX'} & set(sys.modules)\n"
        "assert metrics.Sum(1).merge(metrics.Sum(2)).compute() == 3"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
