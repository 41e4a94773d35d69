"""The training loop: what it waits for, what time it counts, what it saves when something is wrong, how it stops."""

import gc
import signal
import threading
import types

import numpy as np
import pytest

from t5x.partitioning import distributed
from t5x.telemetry import ThroughputClock
from t5x.trainer import loop, signals
from t5x.trainer import metric_lines as lines_lib
from t5x.trainer.actions import Actions, ActionStop, BaseAction, TerminateOnNanAction
from t5x.trainer.metric_lines import MetricLines
from t5x.trainer.signals import StopRequest
from tests.trainer.test_metric_lines import step as metrics_of_a_step

SECONDS = {"step": 2.0, "save": 10.0, "evaluation": 50.0}


class World:
    """A trainer, data and a clock: a step is dispatched at once, and done two seconds after the one before it."""

    def __init__(self):
        self.now = self.devices_done = 0.0
        self.steps = self.batches = 0
        self.loss = 1.0
        self.train_state = types.SimpleNamespace(params={"w": np.ones(2, np.float32)})
        self.model = types.SimpleNamespace(optimizer_def=None)
        self.saved, self.written = {}, {}
        self.saves, self.evaluated = [], []  # (step, action that ended the run), (step, modes)
        self.at_step = self.at_save = self.at_evaluation = lambda step: None

    def step(self, batch):
        self.steps += 1
        self.at_step(self.steps)
        self.devices_done = max(self.now, self.devices_done) + SECONDS["step"]
        return metrics_of_a_step(loss=self.loss, tokens=100) | {"done": self.devices_done}

    def passes(self, what):
        self.now = max(self.now, self.devices_done) + SECONDS[what]

    def run(self, total_steps, concurrent=False, write=None, stop=None, actions=None, **times):
        periods = {"stats_period": 4, "eval_periods": {}, "save_period": None} | times
        lines = MetricLines(
            write or (lambda step, figures: self.written.update({step: figures})), concurrent=concurrent
        )

        def save(step, position, ended):
            self.passes("save")
            self.saved[step] = position
            self.saves.append((step, ended))
            self.at_save(step)

        def evaluate(step, modes):
            self.passes("evaluation")
            self.evaluated.append((step, list(modes)))
            return self.at_evaluation(step)

        try:
            return loop.run_loop(
                self, Data(self), loop.Timetable(total_steps=total_steps, **periods), first_step=0, batch_size=8,
                lines=lines, clock=ThroughputClock(lambda: self.now), save=save,
                evaluate=evaluate, actions=Actions(actions), stop=StopRequest() if stop is None else stop,
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


# --- Stops ------------------------------------------------------------------------------------------------------------

EVERY = {"save_period": 2, "stats_period": 2, "eval_periods": {"TRAIN_EVAL": 2, "INFER_EVAL": 4}}


def at(expected, do):
    """Return a hook that calls `do` at one step."""
    return lambda step: do() if step == expected else None


def terminate():
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def heeded_signals():
    """Handle all signals: some are ignored if the tests run in the background or under nohup."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in signals.EXIT_CODES}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("hook", ["at_step", "at_save"])
def test_no_evaluation_or_step_starts_after_a_stop_request(world, hook):
    """At step 4 everything is due. The step is written and saved, once, and the run ends."""
    setattr(world, hook, at(4, terminate))
    with StopRequest() as stop:
        assert world.run(8, stop=stop, **EVERY) == (4, None)
    assert world.evaluated == [(2, ["TRAIN_EVAL"])]
    assert world.saves == [(2, None), (4, None)]
    assert (world.steps, world.batches, list(world.written)) == (4, 4, [2, 4])


def test_no_step_and_no_second_save_follows_a_stop_request_during_an_evaluation(world):
    world.at_evaluation = at(4, terminate)
    with StopRequest() as stop:
        assert world.run(8, stop=stop, **EVERY) == (4, None)
    assert world.saves == [(2, None), (4, None)] and world.batches == 4


@pytest.mark.parametrize("hook", ["at_step", "at_evaluation"])
def test_a_stop_request_between_two_saves_saves_the_step_it_ends_at(world, hook):
    setattr(world, hook, at(3, terminate))
    with StopRequest() as stop:
        assert world.run(8, stop=stop, save_period=4, eval_periods={"TRAIN_EVAL": 3}) == (3, None)
    assert world.saved == {3: {"batches": 3}} and world.saves == [(3, None)]
    assert world.evaluated == ([(3, ["TRAIN_EVAL"])] if hook == "at_evaluation" else [])


def test_a_stop_request_at_the_last_step_starts_no_evaluation(world):
    world.at_step = at(4, terminate)
    with StopRequest() as stop:
        assert world.run(4, stop=stop, **EVERY) == (4, None)
    assert world.evaluated == [(2, ["TRAIN_EVAL"])] and world.saves == [(2, None), (4, None)]


def test_a_stop_request_before_the_first_step_reads_and_saves_nothing(world):
    with StopRequest() as stop:
        stop.something_to_save = True
        terminate()
        assert world.run(4, stop=stop, **EVERY) == (0, None)
    assert (world.batches, world.saves, world.evaluated) == (0, [], [])


def test_another_process_that_stops_ends_the_run_at_the_step_they_agree_on(world, monkeypatch):
    """The other one has begun six steps; steps, evaluations and saves before that still take place."""
    monkeypatch.setattr(signals, "jax", types.SimpleNamespace(process_count=lambda: 2))
    monkeypatch.setattr(signals, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(distributed, "_notes", {})
    agreed = threading.Event()

    def exchange(name, begun):
        agreed.set()
        return [begun, 6]

    monkeypatch.setattr(distributed, "exchange", exchange)
    interrupted = []

    def notify_this_one():
        distributed.put(stop._common._key, int(signal.SIGTERM))
        assert agreed.wait(20)

    def evaluate_batch(step):
        try:
            stop.check()
        except signals.Interrupted:
            interrupted.append(step)

    world.at_step, world.at_evaluation = at(3, notify_this_one), evaluate_batch
    with StopRequest() as stop:
        assert world.run(12, stop=stop, save_period=4, eval_periods={"TRAIN_EVAL": 3}) == (5, None)
    assert stop.signum == signal.SIGTERM
    assert world.saves == [(4, None), (5, None)] and world.batches == 5
    assert interrupted == []


class EndAt(BaseAction):
    """Ends the run at a step."""

    def __init__(self, step, worth_saving=True):
        self.step, self.worth_saving, self.seen = step, worth_saving, []

    def run(self, train_state, metrics_by_task):
        self.seen.append(metrics_by_task["train"]["loss"])
        return len(self.seen) == self.step


@pytest.mark.parametrize("save_period", [4, None])
def test_an_action_that_ends_the_run_is_saved_once_and_nothing_is_evaluated(world, save_period):
    world.train_state.step = 4
    action = EndAt(2)
    step, ended = world.run(8, actions={"TRAIN": [action]}, **EVERY | {"save_period": save_period})
    assert (step, ended.action) == (4, "EndAt")
    assert world.saves == [(4, ended)]
    assert world.evaluated == [(2, ["TRAIN_EVAL"])]
    assert len(action.seen) == 2 and world.batches == 4


def test_an_action_that_is_not_worth_saving_saves_nothing(world):
    world.train_state.step = 4
    step, ended = world.run(8, actions={"TRAIN": [EndAt(2, worth_saving=False)]}, **EVERY | {"save_period": 4})
    assert (step, ended.worth_saving, world.saves) == (4, False, [])


def test_an_evaluation_that_ends_the_run_is_recorded_with_the_last_step(world):
    ended = ActionStop(3, "EarlyStopping", "", True)
    world.at_evaluation = lambda step: ended if step == 3 else None
    assert world.run(8, eval_periods={"TRAIN_EVAL": 3}, save_period=5) == (3, ended)
    assert world.saves == [(3, ended)] and world.batches == 3


def test_every_save_has_the_position_after_its_own_step(world):
    world.run(7, save_period=3)
    assert world.saved == {3: {"batches": 3}, 6: {"batches": 6}, 7: {"batches": 7}}
    assert world.saves == [(3, None), (6, None), (7, None)]


def test_an_error_right_after_a_save_does_not_save_again(world):
    def fail():
        raise TypeError("another shape")

    world.at_step = at(5, fail)
    with pytest.raises(TypeError, match="another shape"):
        world.run(8, save_period=4)
    assert world.saves == [(4, None)]


def test_an_error_does_not_save_parameters_that_are_not_finite(world):
    def spoil_or_fail(step):
        world.train_state.params = {"w": np.array([np.inf, 1], np.float32)}
        if step == 3:
            raise TypeError("another shape")

    world.at_step = spoil_or_fail
    with pytest.raises(TypeError, match="another shape"):
        world.run(8)
    assert world.saves == []


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_at_its_period_only_and_automatically_again_after_the_run(world, fails, monkeypatch):
    collected, enabled = [], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(world.steps))

    def look(step):
        enabled.append(gc.isenabled())
        if fails and step == 5:
            raise TypeError("another shape")

    world.at_step = look
    if fails:
        with pytest.raises(TypeError, match="another shape"):
            world.run(6, gc_period=2)
    else:
        world.run(6, gc_period=2)
    assert not any(enabled) and gc.isenabled()
    assert collected == ([0, 2, 4] if fails else [0, 2, 4, 6])


@pytest.mark.parametrize(
    ("spoils", "actions", "last_step"),
    [
        (False, None, 12),  # the run may recover
        (True, None, 8),  # a line is checked when the next one is written
        (False, {"TRAIN": [TerminateOnNanAction(task="train")]}, 4),
    ],
)
def test_a_nonfinite_loss_ends_the_run_if_it_cannot_recover_or_an_action_requests_it(
    world, spoils, actions, last_step, caplog
):
    def lose(step):
        world.loss = np.nan if step == 3 else 1.0
        if spoils and step == 3:
            world.train_state.params = {"w": np.array([1, np.nan], np.float32)}

    world.at_step, world.train_state.step = lose, last_step
    step, ended = world.run(12, actions=actions)
    assert step == last_step and "The loss is nan at step 3" in caplog.text
    assert world.saves == ([(12, None)] if last_step == 12 else [])
    assert ended is None or not ended.worth_saving
