"""The training loop: what it waits for, what time it counts, and what it saves when something is wrong."""

import threading
import types

import numpy as np
import pytest

from t5x.telemetry import ThroughputClock
from t5x.trainer import loop
from t5x.trainer import metric_lines as lines_lib
from t5x.trainer.actions import Actions
from t5x.trainer.metric_lines import MetricLines
from tests.trainer.test_metric_lines import step as metrics_of_a_step

SECONDS = {"step": 2.0, "save": 10.0, "evaluation": 50.0}


class World:
    """A trainer, data and a clock: a step is dispatched at once, and done two seconds after the one before it."""

    def __init__(self):
        self.now = self.devices_done = 0.0
        self.steps = self.batches = 0
        self.train_state = types.SimpleNamespace(params={"w": np.ones(2, np.float32)})
        self.model = types.SimpleNamespace(optimizer_def=None)
        self.saved, self.written = {}, {}
        self.at_step = lambda step: None

    def step(self, batch):
        self.steps += 1
        self.at_step(self.steps)
        self.devices_done = max(self.now, self.devices_done) + SECONDS["step"]
        return metrics_of_a_step(tokens=100) | {"done": self.devices_done}

    def passes(self, what):
        self.now = max(self.now, self.devices_done) + SECONDS[what]

    def run(self, total_steps, concurrent=False, write=None, **times):
        periods = {"stats_period": 4, "eval_periods": {}, "save_period": None} | times
        lines = MetricLines(
            write or (lambda step, figures: self.written.update({step: figures})), concurrent=concurrent
        )

        def save(step, position, ended):
            self.passes("save")
            self.saved[step] = position

        try:
            return loop.run_loop(
                self, Data(self), loop.Timetable(total_steps=total_steps, **periods), first_step=0, batch_size=8,
                lines=lines, clock=ThroughputClock(lambda: self.now), save=save,
                evaluate=lambda step, modes: self.passes("evaluation"), actions=Actions(None), stop=Stop(),
                show_progress=False,
            )  # fmt: skip
        finally:
            lines.close()


class Data:
    """Counts in its world, whose own `state` is the trainer's."""

    def __init__(self, world):
        self._world = world

    def __next__(self):
        self._world.batches += 1
        return {}

    def state(self):
        return {"batches": self._world.batches}


class Stop:
    something_to_save = False

    def here(self):
        return False

    def __bool__(self):
        return False


@pytest.fixture
def world(monkeypatch):
    made = World()
    without = lambda metrics: {name: value for name, value in metrics.items() if name != "done"}
    monkeypatch.setattr(lines_lib, "on_host", lambda pending: [without(metrics) for metrics in pending])

    def wait(metrics):
        made.now = max(made.now, metrics["done"])

    monkeypatch.setattr(loop.jax, "block_until_ready", wait)
    return made


@pytest.mark.parametrize("pauses", [{}, {"save_period": 1}, {"save_period": 3}, {"eval_periods": {"TRAIN_EVAL": 2}}])
def test_speed_is_that_of_the_steps_whatever_comes_between_them(world, pauses):
    world.run(12, **pauses)
    for figures in world.written.values():
        assert figures["timing/steps_per_second"] == 0.5
        assert figures["timing/target_tokens_per_second"] == 50


@pytest.mark.parametrize("stats_period", [1, 2])
def test_the_first_line_has_a_speed_too(world, stats_period):
    world.run(4, stats_period=stats_period)
    assert [figures["timing/steps_per_second"] for figures in world.written.values()] == [0.5] * (4 // stats_period)


def test_pauses_are_as_long_as_they_are(world):
    world.run(8, save_period=2, eval_periods={"TRAIN_EVAL": 8})
    assert world.written[8]["timing/checkpoint_seconds"] == 2 * SECONDS["save"]


def test_a_line_is_computed_while_the_next_steps_run(world):
    went_on = threading.Event()
    world.at_step = lambda step: went_on.set() if step == 5 else None
    seen = []
    world.run(8, concurrent=True, write=lambda step, figures: seen.append((step, went_on.wait(20))))
    assert seen == [(4, True), (8, True)]


def test_a_step_that_fails_is_not_counted_as_read(world):
    def fails(step):
        if step == 6:
            raise TypeError("another shape")

    world.at_step = fails
    with pytest.raises(TypeError, match="another shape"):
        world.run(8)
    assert world.saved == {5: {"batches": 5}}


@pytest.mark.parametrize("spoilt_at", [4, 7, 8])
def test_parameters_that_an_update_has_spoilt_are_never_saved(world, spoilt_at, caplog):
    """Neither loss nor gradient show it until the next step."""

    def spoil(step):
        if step == spoilt_at:
            world.train_state.params = {"w": np.array([1, np.nan], np.float32)}

    world.at_step = spoil
    step, ended = world.run(8, save_period=2)
    bad = spoilt_at + spoilt_at % 2
    assert (step, ended.worth_saving) == (bad, False)
    assert list(world.saved) == list(range(2, bad, 2))
    assert f"After step {bad}, none of the 1 parameters" in caplog.text
