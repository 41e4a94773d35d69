"""Which checkpoints stay because of a metric."""

import functools
import json
import logging

import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, Ranking, SaveBestCheckpointer
from t5x.checkpoints.best import BestRule
from t5x.checkpoints.config import SaveCheckpointConfig
from t5x.data import JSONLogger
from t5x.telemetry import MetricWriter

METRIC = "inference_eval/dates/exact_match"


def evaluate(model_dir, step: int, value: float) -> None:
    """Writes what an evaluation of the task `dates` writes."""
    JSONLogger(str(model_dir / "inference_eval"), 0)("dates", step, {"exact_match": value}, [], {}, [])


def store_of(model_dir, *, keep: int | None = 1, **rule) -> CheckpointStore:
    return CheckpointStore(model_dir, keep=keep, best=Ranking(BestRule(METRIC, **rule), model_dir))


def save(store: CheckpointStore, step: int, **options) -> None:
    store.save(step, {"target": {"x": np.full(3, step)}}, sidecars={}, **options)
    store.wait()


def train(store: CheckpointStore, values: dict[int, float | None]) -> list[list[int]]:
    """Saves and evaluates in turn; the steps that are left after each evaluation. None is no evaluation."""
    left = []
    for step, value in values.items():
        save(store, step)
        if value is not None:
            evaluate(store.directory, step, value)
            store.retire(step)
        left.append(store.steps())
    return left


def best(model_dir) -> tuple[int, float]:
    record = json.loads((model_dir / "best.json").read_text())
    assert record["metric"] == METRIC and record["checkpoint"] == f"checkpoint_{record['step']}"
    return record["step"], record["value"]


def test_the_best_stay_besides_the_newest(tmp_path):
    left = train(store_of(tmp_path), {1: 50.0, 2: 70.0, 3: 60.0, 4: 70.0, 5: 80.0})
    # Of two that are as good the earlier one stays; 5 is better, and the newest itself.
    assert left == [[1], [2], [2, 3], [2, 4], [5]]
    assert best(tmp_path) == (5, 80.0)


def test_several_of_the_smallest_may_be_the_best(tmp_path):
    store = store_of(tmp_path, keep=2, mode="min", keep_period=None, keep_without_metric=True)
    left = train(store, {1: 5.0, 2: 3.0, 3: float("nan"), 4: 4.0, 5: 9.0})
    assert left[-1] == [2, 4, 5] and best(tmp_path) == (2, 3.0)


@pytest.mark.parametrize(("mode", "expected"), [("max", (3, 5.0)), ("min", (2, 3.0))])
def test_a_value_that_is_not_a_number_is_the_worst_and_never_the_best(mode, expected, tmp_path):
    store = store_of(tmp_path, mode=mode)
    train(store, {1: float("nan")})
    assert not (tmp_path / "best.json").exists()
    left = train(store, {2: 3.0, 3: 5.0, 4: float("nan"), 5: float("nan")})
    assert left[-1] == [expected[0], 5] and best(tmp_path) == expected


def test_a_checkpoint_stays_until_its_evaluation_is_there(tmp_path):
    """It is saved before it is evaluated: it is the newest then, and does not drive out the best so far."""
    store = store_of(tmp_path)
    train(store, {1: 50.0, 2: 10.0})
    save(store, 3)
    assert store.steps() == [1, 3]
    evaluate(tmp_path, 3, 60.0)
    store.retire(3)
    assert store.steps() == [3]


@pytest.mark.parametrize(("stay", "expected"), [(True, [1, 2, 4, 5]), (False, [2, 5])])
def test_checkpoints_between_evaluations_stay_or_go_with_age(stay, expected, tmp_path):
    store = store_of(tmp_path, keep_without_metric=stay)
    assert train(store, {1: None, 2: 70.0, 3: 60.0, 4: None, 5: 65.0})[-1] == expected


def test_a_run_that_is_started_again_knows_the_values(tmp_path):
    train(store_of(tmp_path), {1: 90.0, 2: 70.0})
    assert train(store_of(tmp_path), {3: 80.0, 4: 60.0})[-1] == [1, 4]


def test_pinned_ones_and_those_of_the_period_stay(tmp_path):
    store = store_of(tmp_path, keep_period=4)
    save(store, 1, pinned=True)
    evaluate(tmp_path, 1, 0.0)
    assert train(store, {2: 90.0, 3: 10.0, 4: 20.0, 5: 30.0, 6: 40.0})[-1] == [1, 2, 4, 6]


def test_with_all_kept_the_best_is_noted(tmp_path):
    assert train(store_of(tmp_path, keep=None), {1: 50.0, 2: 40.0})[-1] == [1, 2]
    assert best(tmp_path) == (1, 50.0)


def test_every_kind_of_metric_is_found(tmp_path):
    with MetricWriter(tmp_path / "train", collection="train") as writer:
        writer.write_scalars(1, {"loss": 2.0, "timing/seconds": 5.0})
    with MetricWriter(tmp_path / "training_eval" / "dates", collection="training_eval") as writer:
        writer.write_scalars(1, {"loss": 3.0})
    evaluate(tmp_path, 1, 4.0)
    values = {
        "train/loss": 2.0, "train/timing/seconds": 5.0, "training_eval/dates/loss": 3.0, METRIC: 4.0,
        "inference_eval/dates/eval/exact_match": 4.0,
    }  # fmt: skip
    for metric, value in values.items():
        Ranking(BestRule(metric), tmp_path).retained([1])
        record = json.loads((tmp_path / "best.json").read_text())
        assert (record["metric"], record["value"]) == (metric, value)


def test_misspelt_metric_is_reported_with_the_existing_ones(tmp_path, caplog):
    ranking = Ranking(BestRule("inference_eval/dates/exactmatch", keep_without_metric=False), tmp_path)
    with pytest.raises(UserError, match=r"train/, training_eval/dates/\..*best_metric"):
        ranking.check(["train", "training_eval/dates"])
    ranking.check(["inference_eval/dates"])
    evaluate(tmp_path, 1, 4.0)
    for _ in range(2):
        assert ranking.retained([1, 2]) == {1, 2}  # nothing is removed by mistake
    assert caplog.text.count("has no 'exactmatch', only exact_match") == 1


def test_metric_that_is_never_written_is_reported(tmp_path, caplog):
    ranking = Ranking(BestRule(METRIC), tmp_path)
    for _ in range(2):
        ranking.expect()
    assert caplog.text.count("@seqio.JSONLogger") == 1
    evaluate(tmp_path, 1, 4.0)
    caplog.clear()
    Ranking(BestRule(METRIC), tmp_path).expect()
    assert caplog.text == ""


def test_t5x_keeps_the_best_and_the_newest():
    maker = functools.partial(SaveBestCheckpointer, metric_name_to_monitor=METRIC, force_keep_period=100)
    cfg = SaveCheckpointConfig(keep=3, checkpointer_cls=maker)
    assert (cfg.keep_newest, cfg.best) == (1, BestRule(METRIC, "max", 3, True, 100))
    cfg = SaveCheckpointConfig(keep=3, best_metric="train/loss", best_mode="min", keep_best=2)
    assert (cfg.keep_newest, cfg.best) == (3, BestRule("train/loss", "min", 2))
    assert SaveCheckpointConfig(keep=3).best is None
    maker = functools.partial(SaveBestCheckpointer, metric_name_to_monitor=None)
    cfg = SaveCheckpointConfig(keep=3, checkpointer_cls=maker)
    assert (cfg.keep_newest, cfg.best) == (3, None)
    with pytest.raises(UserError, match="best_metric and checkpointer_cls"):
        SaveCheckpointConfig(best_metric="train/loss", checkpointer_cls=SaveBestCheckpointer)
    with pytest.raises(UserError, match="'maximum'"):
        SaveCheckpointConfig(best_metric="train/loss", best_mode="maximum")


def test_unwritable_record_of_the_best_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "best.json").mkdir()
    with caplog.at_level(logging.WARNING):
        train(store_of(tmp_path), {1: 50.0})
    assert "best.json" in caplog.text
