"""Lines of metrics: what they count when a save or a stop falls into the middle of one."""

import logging

import pytest

from t5x.metrics.accumulators import Average, AveragePerStep, Sum, from_json
from t5x.telemetry import Throughput
from t5x.trainer import metric_lines as lines_lib
from t5x.trainer.metric_lines import MetricLines


@pytest.fixture(autouse=True)
def numbers_as_they_are(monkeypatch):
    monkeypatch.setattr(lines_lib, "on_host", list)


def step(loss=1.0, tokens=10, **more):
    metrics = {
        "loss": AveragePerStep(total=loss),
        "loss_per_nonpadding_target_token": Average(loss, tokens),
        "target_tokens": Sum(tokens),
        "non_padding_fraction/overall": Average(3 * tokens, 100),
    }
    return metrics | more


def lap(seconds=1.0, steps=10):
    return Throughput(seconds, steps, 0, 0, 0.0)


def made(**options):
    written = {}
    return MetricLines(lambda step, figures: written.update({step: figures}), **options), written


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("saved_at", [(), (8,), (3, 10)])
def test_a_save_in_the_middle_changes_nothing(saved_at, concurrent):
    lines, written = made(concurrent=concurrent)
    for number in range(1, 11):
        lines.add(step(loss=number))
        if number in saved_at:
            lines.unfinished(number)
    lines.line(10, lap(), {})
    lines.wait()
    assert written[10]["loss"] == 5.5
    assert written[10]["timing/target_tokens_per_second"] == 100
    assert written[10]["timing/input_tokens_per_second"] == 200


def test_a_resumed_line_has_all_steps_but_the_speed_of_its_own():
    first, _ = made()
    for number in (1, 2):
        first.add(step(loss=number))
    before = from_json(first.unfinished(2))
    lines, written = made(before=before)
    lines.add(step(loss=3))
    lines.line(3, lap(steps=1), {})
    lines.wait()
    assert written[3]["loss"] == 2 and written[3]["timing/target_tokens_per_second"] == 10


def test_other_metrics_than_before_the_stop_restart_the_line():
    lines, written = made(before=step(loss=100.0, weight=Sum(1.0)))
    lines.add(step(loss=2.0))
    lines.line(2, lap(steps=1), {})
    lines.wait()
    assert written[2]["loss"] == 2.0


def test_every_loss_that_is_not_finite_is_reported_again():
    lines, _ = made()
    for number, loss in enumerate([1.0, float("inf"), 1.0, float("nan")], 1):
        lines.add(step(loss=loss))
        lines.unfinished(number)
        found = lines.take_nonfinite()
        assert (found is None) == (number in (1, 3))
        assert found is None or found.last_step == number


@pytest.mark.parametrize(("waited", "is_slow"), [(0.08, False), (0.12, True)])
def test_training_that_waits_for_data_is_reported_once(waited, is_slow, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("t5x"), "propagate", True)
    lines, _ = made()
    for number in (1, 2):
        lines.add(step())
        lines.line(number, Throughput(1.0, 1, 0, 0, waited), {})
        lines.wait()
        assert lines.summary.get("waiting for data %") == (pytest.approx(100 * waited) if is_slow else None)
    assert caplog.text.count("training waits for data 12 % of the time") == is_slow


def test_a_line_has_its_own_steps_only_and_the_learning_rate_of_the_last():
    lines, written = made()
    for number in range(1, 5):
        lines.add(step(loss=number, learning_rate=AveragePerStep(total=number / 10)))
        lines.unfinished(number)  # as a save after every step does
        if number % 2 == 0:
            lines.add(step(loss=number, learning_rate=AveragePerStep(total=number / 10)))
            lines.line(number, lap(steps=2), {})
    lines.wait()
    assert {number: line["loss"] for number, line in written.items()} == pytest.approx({2: 5 / 3, 4: 11 / 3})
    assert {number: line["learning_rate/current"] for number, line in written.items()} == {2: 0.2, 4: 0.4}


def test_the_last_learning_rate_is_that_of_the_last_pending_step():
    lines, written = made()
    for rate in (0.1, 0.2, 0.6):
        lines.add(step(learning_rate=AveragePerStep(total=rate)))
    lines.line(3, lap(steps=3), {})
    lines.wait()
    assert written[3]["learning_rate/current"] == 0.6 and written[3]["learning_rate"] == pytest.approx(0.3)


def test_tokens_per_second_are_of_the_steps_that_the_time_is_of():
    """The devices still run the last step when the time is taken."""
    lines, written = made()
    for _ in range(10):
        lines.add(step())
    lines.line(10, lap(seconds=3.0, steps=9), {})
    lines.wait()
    assert written[10]["timing/target_tokens_per_second"] == 30
    assert written[10]["timing/input_tokens_per_second"] == 60
