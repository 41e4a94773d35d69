"""What ends a run before its last step."""

import json
import math
from types import SimpleNamespace

import pytest

from t5x._runtime.errors import UserError
from t5x.trainer.actions import ActionMode, Actions, BaseAction, EarlyStoppingAction, TerminateOnNanAction

NAN = math.nan


def state(step):
    return SimpleNamespace(step=step)


def stops_at(action, values):
    """Which evaluation, from 1, the action ends the run at."""
    for number, value in enumerate(values, start=1):
        if action.run(state(100 * number), {"dev": {"loss": value, "other": 0.0}}):
            return number
    return None


def early(mode="min", **arguments):
    return EarlyStoppingAction(metric=("dev", "loss"), mode=mode, **arguments)


@pytest.mark.parametrize(
    ("mode", "arguments", "values", "expected"),
    [
        ("min", {}, [5, 4, 3, 2, 1], None),
        ("min", {}, [1, 2, 3], 3),
        ("max", {}, [1, 2, 3], None),
        ("max", {}, [3, 2, 1], 3),
        ("min", {}, [1, 1, 1], 3),  # the same again is no improvement
        ("min", {}, [1, 2, 1.5, 2, 1.5, 2], None),  # each is compared with the one before it, not with the best
        ("min", {}, [3, 2, 1, 2, 2, 0], 5),
        ("min", {"patience": 2}, [3, 2, 2], 3),
        ("min", {"patience": 4}, [1, 1, 1, 0, 0, 0, 0], 7),
        ("min", {"atol": 0.5}, [10, 9.5, 9.0], 3),  # by exactly the tolerance is not enough
        ("min", {"atol": 0.5}, [10, 9.4, 8.8], None),
        ("max", {"atol": 0.5}, [10, 10.5, 11.0], 3),
        ("max", {"atol": 0.5}, [10, 10.6, 11.2], None),
        ("min", {"rtol": 0.1}, [-10, -10.9, -11.9], 3),  # relative to the magnitude
        ("max", {"rtol": 0.1}, [10, 11.1, 12.3], None),
        ("min", {}, [1, NAN, NAN], 3),
        ("min", {}, [NAN, 5, 6], None),
        ("max", {"rtol": 0.1}, [-math.inf, 1, 0.5], None),
    ],
)
def test_early_stopping(mode, arguments, values, expected):
    assert stops_at(early(mode, **arguments), values) == expected


@pytest.mark.parametrize("restart_after", [1, 2, 3, 4])
def test_a_restart_changes_nothing_even_if_the_last_evaluation_is_repeated(restart_after):
    values = [3.0, 2.9, 3.0, NAN, NAN]
    expected = stops_at(early(patience=4), values)
    before = Actions({"TRAIN_EVAL": [early(patience=4)]})
    for number in range(1, restart_after + 1):
        assert before.run("TRAIN_EVAL", state(100 * number), {"dev": {"loss": values[number - 1]}}) is None
    after = Actions({"TRAIN_EVAL": [early(patience=4)]})
    after.restore(json.loads(json.dumps(before.state(), allow_nan=False)))
    for number in range(restart_after, 6):
        if after.run("TRAIN_EVAL", state(100 * number), {"dev": {"loss": values[number - 1]}}):
            break
    assert number == expected == 5


def test_state_goes_to_the_action_that_it_is_of():
    of = lambda metric: EarlyStoppingAction(metric=("dev", metric), mode="min", patience=2)
    before = Actions({"TRAIN_EVAL": [of("loss"), of("error")], "INFER_EVAL": [of("loss")]})
    before.run("TRAIN_EVAL", state(1), {"dev": {"loss": 1.0, "error": 9.0}})
    after = Actions({"TRAIN_EVAL": [of("error"), of("new"), of("loss")]})
    after.restore(before.state())
    stop = after.run("TRAIN_EVAL", state(2), {"dev": {"loss": 0.5, "error": 9.5, "new": 1.0}})
    assert stop.action == "EarlyStoppingAction(dev, error, min)"
    assert "9 at step 1, 9.5 at step 2" in stop.reason


def test_a_run_that_an_action_ended_resumes_with_other_actions_only():
    recorded = json.loads(json.dumps(Actions({"TRAIN_EVAL": [early(patience=2)]}).state()))
    assert Actions({"TRAIN_EVAL": [early(patience=2)]}).same_as(recorded)
    for other in ({"TRAIN_EVAL": [early(patience=20)]}, {"INFER_EVAL": [early(patience=2)]}, {"TRAIN_EVAL": []}, None):
        assert not Actions(other).same_as(recorded)


def test_the_reason_of_a_stop_is_one_line():
    actions = Actions({"INFER_EVAL": [EarlyStoppingAction(("mnli", "accuracy"), "max", patience=2)]})
    assert actions.run("INFER_EVAL", state(100), {"mnli": {"accuracy": 81.25}}) is None
    stop = actions.run("INFER_EVAL", state(200), {"mnli": {"accuracy": 80.5}})
    assert "EarlyStoppingAction(mnli, accuracy, max)" in str(stop) and "\n" not in str(stop)
    assert "patience 2): 81.25 at step 100, 80.5 at step 200" in str(stop)
    assert stop.worth_saving


def test_the_reason_states_the_tolerance():
    action = early(patience=2, atol=0.5, rtol=0.01)
    assert stops_at(action, [3.0, 2.75]) == 2
    assert "0.5 + 0.01 of the previous value (patience 2): 3 at" in action.reason


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_run_ends_on_nan_and_infinity_and_is_not_saved(value):
    actions = Actions({"TRAIN": [TerminateOnNanAction(task="train")]})
    assert actions.run("TRAIN", state(100), {"train": {"loss": 1e30}}) is None
    stop = actions.run("TRAIN", state(200), {"train": {"loss": value}})
    assert (stop.step, stop.worth_saving) == (200, False)
    assert f"loss of train is {value}" in str(stop)


@pytest.mark.parametrize("action", [early(), TerminateOnNanAction(task="dev")])
@pytest.mark.parametrize(
    "metrics, warning",
    [
        ({"dev": {"accuracy": NAN, "z_loss": 2.0}}, "no metric 'loss'. It has accuracy, z_loss."),
        ({"train": {}, "test": {}}, "no task 'dev'. There is train, test."),
        ({"dev": {"loss": "low"}}, "'loss' of 'dev' is 'low', which is not a number"),
    ],
)
def test_an_action_without_its_metric_warns_and_the_run_continues(action, metrics, warning, caplog):
    assert not action.run(state(1), metrics)
    assert warning in caplog.text


def test_actions_on_absent_tasks_raise_user_error():
    tasks = {"TRAIN": ["train"], "TRAIN_EVAL": ["dev"], "INFER_EVAL": []}
    Actions({"TRAIN": [TerminateOnNanAction("train")], "TRAIN_EVAL": [early()]}).check(tasks)
    with pytest.raises(UserError, match=r"no task 'loss'.*train"):
        Actions({"TRAIN": [TerminateOnNanAction("loss")]}).check(tasks)
    with pytest.raises(UserError, match="infer_eval_dataset_cfg"):
        Actions({"INFER_EVAL": [early()]}).check(tasks)


class AtStep(BaseAction):
    def __init__(self, step):
        self.step = step
        self.seen = []

    def run(self, train_state, metrics_by_task):
        self.seen.append(train_state.step)
        return train_state.step >= self.step


def test_users_write_their_own_and_every_action_is_run():
    first, second = AtStep(2), AtStep(1)
    actions = Actions({ActionMode.TRAIN: [first, second]})
    actions.check({"TRAIN": ["train"]})
    assert str(actions.run("TRAIN", state(1), {"train": {}})) == "AtStep ends the run after step 1"
    assert actions.run("TRAIN_EVAL", state(2), {"dev": {}}) is None
    assert first.seen == second.seen == [1]
    actions.restore(json.loads(json.dumps(actions.state())))
    assert not Actions(None).run("TRAIN", state(1), {"train": {}})


def test_the_first_action_that_ends_the_run_decides_whether_it_is_saved():
    early_stop, on_nan = early(patience=2), TerminateOnNanAction(task="dev")
    for first, second, worth_saving in ((early_stop, on_nan, True), (on_nan, early_stop, False)):
        actions = Actions({"TRAIN_EVAL": [first, second]})
        actions.restore({"TRAIN_EVAL": [[str(early_stop), {"history": [[1, 1.0]]}, {}]]})
        stop = actions.run("TRAIN_EVAL", state(2), {"dev": {"loss": NAN}})
        assert (stop.action, stop.worth_saving) == (str(first), worth_saving)


def test_a_step_that_is_not_finite_ends_the_run_if_an_action_of_training_asks_for_it():
    asked = Actions({"TRAIN": [AtStep(9), TerminateOnNanAction(task="train")]})
    assert (asked.end_on_nan(7).step, asked.end_on_nan(7).worth_saving) == (7, False)
    for others in ({"TRAIN_EVAL": [TerminateOnNanAction(task="dev")]}, {"TRAIN": [AtStep(9)]}, None):
        assert Actions(others).end_on_nan(7) is None


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"EVAL": []}, "TRAIN, TRAIN_EVAL, INFER_EVAL"),
        ({"TRAIN": TerminateOnNanAction("train")}, "must be a list"),
        ({"TRAIN": [TerminateOnNanAction]}, r"with brackets: \[@trainer.TerminateOnNanAction\(\)\]"),
    ],
)
def test_mistakes_in_the_configuration_are_explained(actions, message):
    with pytest.raises(UserError, match=message):
        Actions(actions)


@pytest.mark.parametrize(
    "arguments",
    [
        {"metric": "loss"},
        {"metric": ("loss",)},
        {"mode": "lower"},
        {"patience": 1},
        {"atol": -1.0},
        {"rtol": -0.1},
    ],
)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(UserError, match=f"trainer.EarlyStoppingAction.*{next(iter(arguments))}"):
        EarlyStoppingAction(**{"metric": ("dev", "loss"), "mode": "min"} | arguments)
