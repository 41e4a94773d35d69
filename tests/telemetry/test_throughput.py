import pytest

from t5x.telemetry import ThroughputClock


class Time:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def passes(self, seconds):
        self.seconds += seconds


@pytest.fixture
def time():
    return Time()


def rates(lap):
    names = ("steps_per_second", "target_tokens_per_second", "data_wait_share")
    return tuple(lap.scalars(cores=1)[f"timing/{name}"] for name in names)


def test_rates_of_a_lap(time):
    clock = ThroughputClock(now=time)
    for _ in range(4):
        time.passes(0.5)
        clock.add(sequences=8, target_tokens=100)
    lap = clock.lap()
    assert (lap.seconds, lap.steps, lap.sequences, lap.target_tokens) == (2.0, 4, 32, 400)
    assert rates(lap)[:2] == (2.0, 200.0)
    time.passes(1.0)
    clock.add(steps=10, sequences=1, target_tokens=1)
    assert rates(clock.lap())[0] == 10.0


def test_pauses_do_not_count_even_nested_or_when_they_fail(time):
    clock = ThroughputClock(now=time)
    time.passes(1.0)
    with clock.apart("outer"):
        time.passes(50.0)
        with clock.apart("inner"):
            time.passes(50.0)
        time.passes(50.0)
    time.passes(1.0)
    with pytest.raises(ValueError), clock.apart("failed"):
        time.passes(50.0)
        raise ValueError
    time.passes(1.0)
    assert clock.lap().seconds == 3.0
    assert clock.notes() == {"outer": 150.0, "inner": 50.0}
    assert clock.scalars()["timing/uptime"] == 203.0


def test_a_lap_may_end_inside_a_pause(time):
    clock = ThroughputClock(now=time)
    time.passes(2.0)
    with clock.apart("pause"):
        time.passes(30.0)
        assert clock.lap().seconds == 2.0
        time.passes(30.0)
        assert clock.lap().seconds == 0.0
    time.passes(4.0)
    assert clock.lap().seconds == 4.0


def test_waiting_for_data_is_a_share_of_the_work(time):
    clock = ThroughputClock(now=time)
    with clock.waiting_for_data():
        time.passes(1.0)
    time.passes(3.0)
    with clock.apart("pause"), clock.waiting_for_data():
        time.passes(9.0)
    assert rates(clock.lap())[2] == 0.25
    assert rates(clock.lap())[2] == 0.0


def test_scalars_have_the_names_of_t5x(time):
    clock = ThroughputClock(now=time)
    time.passes(2.0)
    clock.add(sequences=64, target_tokens=640)
    assert clock.lap().scalars(cores=8) == {
        "timing/seconds": 2.0,
        "timing/seqs": 64,
        "timing/steps_per_second": 0.5,
        "timing/seqs_per_second": 32.0,
        "timing/seqs_per_second_per_core": 4.0,
        "timing/target_tokens_per_second": 320.0,
        "timing/target_tokens_per_second_per_core": 40.0,
        "timing/input_tokens_per_second": 0.0,
        "timing/data_wait_share": 0.0,
    }


def test_an_empty_lap_has_rates_of_zero(time):
    assert rates(ThroughputClock(now=time).lap()) == (0.0, 0.0, 0.0)


def test_input_tokens_have_their_own_rate(time):
    clock = ThroughputClock(now=time)
    time.passes(2.0)
    clock.add(sequences=8, target_tokens=100, input_tokens=600)
    assert clock.lap().scalars(cores=1)["timing/input_tokens_per_second"] == 300.0
    time.passes(1.0)
    assert clock.lap().input_tokens == 0


def test_pauses_are_recorded_by_name(time):
    clock = ThroughputClock(now=time)
    with clock.apart("timing/init_or_restore_seconds"):
        time.passes(7.0)
    assert clock.notes() == {"timing/init_or_restore_seconds": 7.0}
    clock.start()
    time.passes(1.0)
    for seconds in (2.0, 3.0):
        with clock.apart("timing/checkpoint_seconds"):
            time.passes(seconds)
    with pytest.raises(ValueError), clock.apart("timing/evaluate_seconds"):
        raise ValueError
    assert clock.notes() == {"timing/checkpoint_seconds": 5.0}
    assert clock.notes() == {}
    assert clock.lap().seconds == 1.0


def test_the_first_lap_excludes_preparation(time):
    clock = ThroughputClock(now=time)
    time.passes(60.0)
    clock.start()
    time.passes(1.0)
    clock.add(sequences=1, target_tokens=1)
    assert rates(clock.lap())[0] == 1.0


def test_goodput_is_the_share_of_all_time_spent_on_steps(time):
    clock = ThroughputClock(now=time)
    assert clock.scalars()["timing/goodput"] == 0.0
    with clock.apart("timing/compilation_seconds"):
        time.passes(20.0)
    time.passes(10.0)  # not measured, but not a step either
    clock.start()
    with clock.waiting_for_data():
        time.passes(5.0)
    time.passes(25.0)
    clock.lap()
    assert clock.scalars()["timing/goodput"] == 25.0 / 60.0
    with clock.apart("timing/evaluate_seconds"):
        time.passes(15.0)
    time.passes(25.0)
    clock.lap()
    assert clock.scalars() == {"timing/uptime": 100.0, "timing/goodput": 0.5}
