"""Evaluations during training: what they average, and that they end between two batches if the run is to stop."""

import json
import types

import numpy as np
import pytest

from t5x import data
from t5x.metrics.accumulators import Average, AveragePerStep
from t5x.partitioning import PjitPartitioner
from t5x.trainer import Interrupted, StateLayout
from t5x.trainer.evaluation import InferenceEvaluation, TeacherForcedEvaluation
from tests.support import tiny

LENGTHS = {"inputs": 9, "targets": 7}


@pytest.fixture(scope="module")
def layout():
    model = tiny.model()
    return StateLayout.of(model, PjitPartitioner(), model.input_shapes(LENGTHS))


def make_task(metric_fns=()):
    features = {name: data.Feature(data.PassThroughVocabulary(31, eos_id=1), add_eos=False) for name in LENGTHS}
    examples = [{"inputs": [n + 3, 4], "targets": [n + 3]} for n in range(10)]
    source = data.FunctionDataSource(lambda split: examples, splits=("train",))
    return data.Task("both", source, features, [], metric_fns=metric_fns)


def config(task):
    return data.DatasetConfig(task, LENGTHS, "train", batch_size=4, shuffle=False, seed=0)


class Measured:
    """A trainer whose metrics of a batch are in the batch."""

    def __init__(self):
        self.batches = 0

    def measure(self, batch):
        self.batches += 1
        loss, tokens = float(batch["loss"]), int(batch["tokens"])
        return {
            "loss_per_nonpadding_target_token": Average(np.float32(loss * tokens), np.int32(tokens)),
            "accuracy": Average(np.float32(0), np.int32(tokens)),
            "loss": AveragePerStep(total=np.float32(loss), steps=np.int32(1)),
        }


def teacher_forced(layout, directory, batches, **options):
    return TeacherForcedEvaluation(config(make_task()), lambda *_, **__: batches, layout, str(directory), **options)


def batch(loss, tokens):
    return {"loss": np.asarray(loss), "tokens": np.asarray(tokens)}


BATCHES = {"one": [batch(1.0, 10), batch(4.0, 20)], "two": [batch(10.0, 30), batch(2.0, 0), batch(99.0, 1)]}


def records(directory, task):
    path = directory / "training_eval" / task / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_teacher_forced_losses_are_averaged_over_tokens_of_each_task_and_of_all(layout, tmp_path):
    evaluation = teacher_forced(layout, tmp_path, BATCHES, eval_steps=2)
    assert evaluation.tasks == ["one", "two", "both"]
    asked = []
    results = evaluation.evaluate(Measured(), 5, lambda: asked.append(1))
    evaluation.close()
    losses = {task: metrics["loss_per_nonpadding_target_token"] for task, metrics in results.items()}
    assert losses == pytest.approx({"one": 90 / 30, "two": 10.0, "both": 390 / 60})
    assert results["both"]["loss"] == pytest.approx(17 / 4)  # per batch
    assert len(asked) == 4, "it may be interrupted before every batch"
    for task in results:
        assert [record["step"] for record in records(tmp_path, task)] == [5]


def test_an_interrupted_evaluation_measures_and_writes_nothing_more(layout, tmp_path):
    trainer, evaluation = Measured(), teacher_forced(layout, tmp_path, BATCHES)

    def stop_before_fourth():
        if trainer.batches == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        evaluation.evaluate(trainer, 5, stop_before_fourth)
    assert trainer.batches == 3
    assert not evaluation.done(5) and not list(tmp_path.glob("training_eval/*"))
    evaluation.evaluate(trainer, 5, lambda: None)
    evaluation.close()
    assert evaluation.done(5) and not evaluation.done(4)
    evaluation.drop_later(4)
    assert not evaluation.done(5)


def test_steps_up_to_the_resumed_one_are_retained_and_later_ones_dropped(layout, tmp_path):
    evaluation = teacher_forced(layout, tmp_path, BATCHES)
    for step in (4, 5, 6):
        evaluation.evaluate(Measured(), step, lambda: None)
    evaluation.close()
    evaluation.drop_later(5)
    assert [record["step"] for record in records(tmp_path, "both")] == [4, 5]


def test_an_evaluation_is_done_only_if_every_task_is(layout, tmp_path):
    evaluation = teacher_forced(layout, tmp_path, BATCHES)
    evaluation.evaluate(Measured(), 4, lambda: None)
    evaluation.close()
    (tmp_path / "training_eval/two/metrics.jsonl").unlink()
    assert not evaluation.done(4)


def test_a_stop_before_an_inference_evaluation_runs_neither_the_model_nor_the_metrics(layout, tmp_path):
    computed, asked = [], []

    def count(targets, predictions):
        computed.append(len(targets))
        return {"count": len(targets)}

    def scored(targets, scores):
        computed.append(len(targets))
        return {"mean": 0.0}

    evaluation = InferenceEvaluation(config(make_task([count, scored])), data.Evaluator, layout, str(tmp_path))

    def interrupt():
        asked.append(1)
        raise Interrupted

    trainer = types.SimpleNamespace(train_state=types.SimpleNamespace(params=None))
    with pytest.raises(Interrupted):
        evaluation.evaluate(trainer, 3, interrupt)
    assert (computed, asked) == ([], [1])
    assert not evaluation.done(3)


def test_every_batch_of_an_inference_evaluation_may_be_interrupted(layout, tmp_path):
    """By decoding and by scoring; metrics of all ten examples are computed once, after the last batch."""
    asked, computed = [], []

    def both(targets, predictions):
        computed.append(len(targets))
        return {"count": len(targets)}

    evaluation = InferenceEvaluation(config(make_task([both])), data.Evaluator, layout, str(tmp_path))
    evaluation._programs = dict.fromkeys(evaluation._programs, lambda params, batch: np.zeros((4, 7), np.int32))
    trainer = types.SimpleNamespace(train_state=types.SimpleNamespace(params=None))
    results = evaluation.evaluate(trainer, 3, lambda: asked.append(1))
    assert (results["both"]["count"], computed, len(asked)) == (10, [10], 3)
