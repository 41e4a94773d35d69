import functools
import json
import logging

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data.evaluator import Evaluator, JSONLogger, Logger, PyLoggingLogger, TensorBoardLogger
from t5x.metrics import accuracy, exact_match

from .conftest import byte_features

CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Norway", "Oslo"), ("Chad", "N'Djamena")]
LENGTHS = {"inputs": 8, "targets": 12}


@pytest.fixture
def add_task(registries):
    def add(name="capitals", pairs=CAPITALS, metric_fns=(exact_match,), splits=("validation",), **kwargs):
        examples = [{"inputs": x, "targets": y, "note": f"#{i}"} for i, (x, y) in enumerate(pairs)]
        source = data.FunctionDataSource(lambda split: examples, splits=splits)
        steps = [data.preprocessors.tokenize, data.preprocessors.append_eos]
        return data.TaskRegistry.add(
            name,
            source=source,
            preprocessors=steps,
            output_features=byte_features(),
            metric_fns=list(metric_fns),
            **kwargs,
        )

    return add


def evaluator(name="capitals", **kwargs):
    kwargs = {"sequence_length": LENGTHS, "batch_size": 2} | kwargs
    return Evaluator(name, data.EncDecFeatureConverter(), **kwargs)


def all_right(batch):
    return batch["decoder_target_tokens"]


def always(text):
    """A model that predicts `text` whatever it is asked."""
    ids = [*data.ByteVocabulary().encode(text), 1, 77, 78]
    return lambda batch: np.tile(ids, (len(batch["encoder_input_tokens"]), 1))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_of_a_task(add_task):
    add_task(metric_fns=[exact_match, accuracy])
    found = evaluator()
    assert [task.name for task in found.eval_tasks] == ["capitals"]
    assert found.evaluate(step=1, predict_fn=all_right) == {"capitals": {"exact_match": 100.0, "accuracy": 100.0}}
    assert found.evaluate(step=2, predict_fn=always("Rome"))["capitals"]["exact_match"] == 20.0


def test_batches_are_full_and_every_example_is_scored_once_in_order(add_task):
    seen, shapes = [], []

    def remember(targets, predictions):
        seen.append((targets, predictions))
        return {"n": len(targets)}

    def predict(batch):
        shapes.append({name: array.shape for name, array in batch.items()})
        return batch["decoder_target_tokens"]

    add_task(metric_fns=[remember])
    assert evaluator().evaluate(step=0, predict_fn=predict) == {"capitals": {"n": 5.0}}
    capitals = [capital for _, capital in CAPITALS]
    assert seen == [(capitals, capitals)]
    assert [shape["encoder_input_tokens"] for shape in shapes] == [(2, 8)] * 3


def test_postprocessing_of_targets_and_predictions(add_task):
    calls = []

    def postprocess(text, example, is_target):
        calls.append((text, example["note"], is_target))
        return text.lower()

    add_task(pairs=CAPITALS[:2], postprocess_fn=postprocess)
    assert evaluator().evaluate(step=0, predict_fn=always("ROME")) == {"capitals": {"exact_match": 50.0}}
    assert calls == [("Paris", "#0", True), ("Rome", "#1", True), ("ROME", "#0", False), ("ROME", "#1", False)]


def test_targets_without_their_text_are_decoded(registries):
    ids = {"inputs": [5, 1], "targets": [*data.ByteVocabulary().encode("Oslo"), 1]}
    data.TaskRegistry.add(
        "ids",
        source=data.FunctionDataSource(lambda split: [ids], splits=["test"]),
        output_features=byte_features(),
        metric_fns=[exact_match],
    )
    found = evaluator("ids", eval_split="test").evaluate(step=0, predict_fn=always("Oslo"))
    assert found == {"ids": {"exact_match": 100.0}}


def test_metrics_get_what_their_parameters_name(add_task):
    def mean_score(targets, scores):
        return {"score": np.mean(scores), "is_float": type(scores[0]) is float}

    def sure(targets, predictions, aux_values):
        right = [t == p for t, p in zip(targets, predictions, strict=True)]
        return {"sure": np.float32(sum(np.array(aux_values["confidence"])[right]))}

    def with_option(targets, predictions, floor=0):
        return {"floor": floor}

    add_task(metric_fns=[mean_score, sure, functools.partial(with_option, floor=7)])
    asked = []

    def score(batch):
        return np.arange(len(batch["encoder_input_tokens"]))

    def predict_with_aux(batch):
        asked.append(batch)
        return batch["decoder_target_tokens"], {"confidence": np.full(len(batch["encoder_input_tokens"]), 0.5)}

    def unused(batch):
        raise AssertionError("predictions come with the aux values")

    found = evaluator().evaluate(step=0, predict_fn=unused, score_fn=score, predict_with_aux_fn=predict_with_aux)
    assert found == {"capitals": {"score": 0.4, "is_float": 1.0, "sure": 2.5, "floor": 7.0}}
    assert len(asked) == 3


def test_a_function_that_the_metrics_need_must_be_given(add_task):
    add_task()
    with pytest.raises(UserError, match=r"'capitals' need predict_fn"):
        evaluator().evaluate(step=0)
    found = evaluator().evaluate(step=0, predict_with_aux_fn=lambda batch: (all_right(batch), {}))
    assert found == {"capitals": {"exact_match": 100.0}}


def test_several_answers_for_an_example(add_task):
    def any_right(targets, predictions):
        return {"any": np.mean([t in p for t, p in zip(targets, predictions, strict=True)])}

    add_task(metric_fns=[any_right])

    def two_answers(batch):
        return np.stack([np.zeros_like(batch["decoder_target_tokens"]), batch["decoder_target_tokens"]], axis=1)

    assert evaluator().evaluate(step=0, predict_fn=two_answers) == {"capitals": {"any": 1.0}}


def test_lengths_are_measured_over_all_tasks(add_task):
    add_task("short", pairs=[("a", "b")])
    add_task("long", pairs=[("a" * 20, "b")])
    data.MixtureRegistry.add("both", ["short", "long"], default_rate=1)
    shapes = set()

    def predict(batch):
        shapes.add((batch["encoder_input_tokens"].shape, batch["decoder_target_tokens"].shape))
        return all_right(batch)

    both = evaluator("both", sequence_length=None)
    assert both.evaluate(step=0, predict_fn=predict) == {
        "short": {"exact_match": 100.0},
        "long": {"exact_match": 100.0},
    }
    assert shapes == {((2, 24), (2, 8))}
    assert both.model_feature_shapes["encoder_input_tokens"] == (24,)


@pytest.mark.parametrize("use_memory_cache", [True, False])
def test_some_examples_only_and_the_same_each_time(add_task, use_memory_cache):
    seen = []

    def remember(targets, predictions):
        seen.append(targets)
        return {"n": len(targets)}

    add_task(metric_fns=[remember], pairs=[(str(i), str(i)) for i in range(100)])
    found = evaluator(num_examples=3, shuffle=True, seed=1, use_memory_cache=use_memory_cache)
    for step in range(2):
        assert found.evaluate(step=step, predict_fn=all_right) == {"capitals": {"n": 3.0}}
    evaluator(num_examples=3).evaluate(step=0, predict_fn=all_right)
    assert seen[0] == seen[1] != ["0", "1", "2"] == seen[2]


def test_tasks_without_split_or_metrics_are_excluded_from_a_mixture(add_task, caplog):
    add_task("whole")
    add_task("trained", splits=("train",))
    add_task("unscored", metric_fns=())
    data.MixtureRegistry.add("all", ["whole", "trained", "unscored"], default_rate=1)
    assert list(evaluator("all").evaluate(step=0, predict_fn=all_right)) == ["whole"]
    assert "trained is not evaluated" in caplog.text and "unscored is not evaluated" in caplog.text
    with pytest.raises(UserError, match=r"split 'validation'.*trained: train"):
        evaluator("trained")


def test_other_processes_run_the_model_and_write_nothing(add_task, tmp_path):
    add_task()
    asked = []

    def predict(batch):
        asked.append(batch)
        return all_right(batch)

    found = evaluator(logger_cls=[JSONLogger], log_dir=tmp_path)
    assert found.evaluate(step=0, predict_fn=predict, compute_metrics=False) == {}
    assert len(asked) == 3 and not list(tmp_path.iterdir())


def test_files_of_the_json_logger(add_task, tmp_path):
    def surprise(targets, scores):
        return {"surprise": float("nan")}

    add_task(metric_fns=[exact_match, surprise])
    found = evaluator(logger_cls=[JSONLogger], log_dir=tmp_path / "inference_eval")
    run = functools.partial(found.evaluate, score_fn=lambda batch: -np.ones(len(batch["encoder_input_tokens"])))
    run(step=10, predict_fn=always("Rome"))
    run(step=1000000, predict_fn=always("Rome"))
    with open(tmp_path / "inference_eval" / "capitals-metrics.jsonl", "a") as file:
        file.write('{"step": 20, "exa')
    run(step=np.int32(10), predict_fn=all_right)
    assert {path.name for path in (tmp_path / "inference_eval").iterdir()} == {
        "capitals-metrics.jsonl",
        "capitals-000010.jsonl",
        "capitals-1000000.jsonl",
    }
    assert read_lines(tmp_path / "inference_eval" / "capitals-metrics.jsonl") == [
        {"step": 1000000, "exact_match": 20.0, "surprise": "nan"},
        {"step": 10, "exact_match": 100.0, "surprise": "nan"},
    ]
    results = read_lines(tmp_path / "inference_eval" / "capitals-000010.jsonl")
    assert len(results) == 5
    assert results[4] == {
        "input": {"inputs_pretokenized": "Chad", "targets_pretokenized": "N'Djamena", "note": "#4"},
        "target": "N'Djamena",
        "prediction": "N'Djamena",
        "score": -1.0,
    }


@pytest.mark.parametrize(("write_n_results", "lines"), [(0, None), (2, 2), (99, 5)])
def test_how_many_results_are_written(add_task, tmp_path, write_n_results, lines):
    add_task()
    make = functools.partial(JSONLogger, write_n_results=write_n_results)
    evaluator(logger_cls=[make], log_dir=tmp_path).evaluate(step=3, predict_fn=all_right)
    path = tmp_path / "capitals-000003.jsonl"
    assert (len(read_lines(path)) if path.exists() else None) == lines


def test_aux_values_are_written(add_task, tmp_path):
    def metric(targets, predictions, aux_values):
        return {"n": len(aux_values["scores"])}

    add_task(metric_fns=[metric])
    evaluator(logger_cls=[JSONLogger], log_dir=tmp_path).evaluate(
        step=3, predict_with_aux_fn=lambda batch: (all_right(batch), {"scores": np.array([[1, 2], [3, 4]])})
    )
    written = [line["aux_scores"] for line in read_lines(tmp_path / "capitals-000003.jsonl")]
    assert written == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]


def test_tensorboard_and_the_log(add_task, tmp_path, caplog):
    add_task()
    found = evaluator(logger_cls=[TensorBoardLogger, PyLoggingLogger], log_dir=tmp_path)
    with caplog.at_level(logging.INFO):
        found.evaluate(step=10, predict_fn=always("Rome"))
    found.evaluate(step=20, predict_fn=all_right)
    events = EventAccumulator(str(tmp_path / "capitals"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/exact_match")] == [(10, 20.0), (20, 100.0)]
    assert "capitals/exact_match at step 10: 20.000" in caplog.text


def test_a_logger_of_ones_own(add_task, tmp_path):
    class Remember(Logger):
        def __call__(self, task_name, step, metrics, dataset, inferences, targets):
            first = (dataset[0]["note"], inferences["prediction"][0], targets[0])
            calls.append((self.output_dir, task_name, step, metrics, first))

    calls = []
    add_task()
    evaluator(logger_cls=[Remember], log_dir=tmp_path).evaluate(step=7, predict_fn=always("Rome"))
    assert calls == [(str(tmp_path), "capitals", 7, {"exact_match": 20.0}, ("#0", "Rome", "Paris"))]
    with pytest.raises(UserError, match="log_dir"):
        evaluator(logger_cls=[Remember])


def test_errors_of_metrics_name_the_task_and_the_function(add_task):
    def divides(targets, predictions):
        return {"ratio": 1 / 0}

    def lists(targets, predictions):
        return {"all": [1, 2]}

    def forgets(targets, predictions):
        return None

    def strange(labels, predictions):
        return {}

    def check(metric_fns, message):
        add_task(metric_fns=metric_fns)
        with pytest.raises(UserError, match=message):
            evaluator().evaluate(step=0, predict_fn=all_right)
        data.TaskRegistry.remove("capitals")

    check([divides], r"divides of task 'capitals' failed: ZeroDivisionError: division by zero")
    check([lists], r"lists of task 'capitals' returned 'all': \[1, 2\], which is not one number")
    check([forgets], r"forgets of task 'capitals' returned None; it must return {name: number}")
    check([strange], r"strange of task 'capitals' .*\(labels, predictions\).*\(targets, scores\)")
    check([exact_match, exact_match], r"Two metric functions of task 'capitals' return \['exact_match'\]")


def test_a_failing_postprocessor_is_named_with_what_it_got(add_task):
    add_task(postprocess_fn=lambda text, **_: int(text))
    with pytest.raises(UserError, match=r"postprocess_fn of task 'capitals' failed on the target 'Paris': ValueError"):
        evaluator().evaluate(step=0, predict_fn=all_right)


def test_a_model_that_returns_too_few_rows_is_refused(add_task):
    add_task()
    with pytest.raises(ValueError, match=r"'prediction' of shape \(1, 12\) for a batch of 2 rows"):
        evaluator().evaluate(step=0, predict_fn=lambda batch: all_right(batch)[:1])


def test_bad_examples_are_errors_or_are_skipped(add_task):
    add_task(pairs=[("France", "Paris"), (None, "Rome"), ("Spain", "Madrid")])
    with pytest.raises(data.BadExample):
        evaluator()
    found = evaluator(skip_bad_examples=True).evaluate(step=1, predict_fn=always("Paris"))
    assert found["capitals"] == {"exact_match": 50.0}


def test_without_examples_metrics_get_empty_lists(add_task):
    add_task(metric_fns=[lambda targets, predictions: {"n": len(targets) + len(predictions)}])
    assert evaluator(num_examples=0).evaluate(step=1, predict_fn=all_right) == {"capitals": {"n": 0.0}}


def test_a_target_that_the_task_does_not_have(add_task):
    add_task()
    with pytest.raises(UserError, match=r"no feature 'labels' to predict; it has inputs, targets"):
        evaluator(target_field_name="labels")


def test_the_names_are_found_where_gin_files_look():
    assert (data.Evaluator, data.JSONLogger) == (Evaluator, JSONLogger)
