"""What is due at a step."""

from t5x.trainer import Timetable


def test_periods_count_from_step_zero_and_everything_is_due_at_the_end():
    times = Timetable(
        total_steps=10, stats_period=3, eval_periods={"TRAIN_EVAL": 4, "INFER_EVAL": 0, "OTHER": None},
        save_period=5, save_steps=(1, 7),
    )  # fmt: skip
    steps = range(1, 11)
    assert [step for step in steps if times.stats_due(step)] == [3, 6, 9, 10]
    assert [step for step in steps if times.save_due(step)] == [1, 5, 7, 10]
    assert {step: modes for step in steps if (modes := times.evaluations_due(step))} == {
        4: ["TRAIN_EVAL"], 8: ["TRAIN_EVAL"], 10: ["TRAIN_EVAL", "INFER_EVAL", "OTHER"],
    }  # fmt: skip


def test_without_a_period_a_run_saves_only_at_its_end():
    times = Timetable(total_steps=4, stats_period=1, eval_periods={}, save_period=None)
    assert [step for step in range(5) if times.save_due(step)] == [4]
