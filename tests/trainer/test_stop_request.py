"""A request to stop: which signals it records, and how several processes agree on the step they stop at."""

import itertools
import signal
import threading
import time
import types

import pytest

from t5x._runtime.errors import UserError
from t5x.partitioning import distributed
from t5x.trainer import signals
from t5x.trainer.signals import Interrupted, StopRequest


@pytest.fixture(autouse=True)
def heeded_signals():
    """Handle all signals: some are ignored if the tests run in the background or under nohup."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in signals.EXIT_CODES}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Exited(Exception):
    """Raised instead of ending the interpreter."""


@pytest.fixture
def exits(monkeypatch):
    def leave(code):
        raise Exited(code)

    monkeypatch.setattr(signals.os, "_exit", leave)


def test_the_first_signal_is_recorded_and_a_later_one_does_not_replace_it(exits):
    with StopRequest() as stop:
        stop.something_to_save = True
        assert not stop.here()
        stop.check()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert stop.here() and bool(stop) and stop.signum == signal.SIGHUP
        with pytest.raises(Interrupted):
            stop.check()
    assert signals.Stopped(stop.signum, "stopped").exit_code == 129


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_exits_at_once(exits, first):
    with StopRequest() as stop:
        stop.something_to_save = True
        signal.raise_signal(first)
        with pytest.raises(Exited, match="130"):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("signum, code", signals.EXIT_CODES.items())
def test_a_signal_before_there_is_something_to_save_exits_with_its_code(exits, signum, code):
    with StopRequest(), pytest.raises(Exited, match=str(code)):
        signal.raise_signal(signum)


def test_ignored_signals_stay_ignored_and_handlers_are_restored():
    received = []
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum)),
    }
    try:
        with StopRequest() as stop:
            stop.something_to_save = True
            signal.raise_signal(signal.SIGHUP)
            assert not stop
            signal.raise_signal(signal.SIGTERM)
            assert stop and not received
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.fixture
def two_processes(monkeypatch):
    """Stop requests of two processes, here two threads, whose notes are in one dictionary."""
    monkeypatch.setattr(signals, "jax", types.SimpleNamespace(process_count=lambda: 2))
    monkeypatch.setattr(signals, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(signals, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(distributed, "_notes", {})
    values, barrier = [], threading.Barrier(2)

    def exchange(name, mine):
        values.append(mine)
        barrier.wait(20)
        return list(values)

    monkeypatch.setattr(distributed, "exchange", exchange)
    return [StopRequest() for _ in range(2)], values


def run_steps(stop, pause, steps, begun):
    """Run steps until the stop; release `begun` after the fifth."""
    with stop:
        stop.something_to_save = True
        while not stop.here():
            steps.append(len(steps))
            if len(steps) == 5:
                begun.release()
            time.sleep(pause)


def test_processes_of_different_speed_stop_after_the_same_step(two_processes):
    stops, published = two_processes
    steps, begun = [[], []], threading.Semaphore(0)
    threads = [
        threading.Thread(target=run_steps, args=(stop, pause, own, begun), daemon=True)
        for stop, pause, own in zip(stops, (0.002, 0.02), steps, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=20) for _ in threads)
    stops[1]._handle(signal.SIGTERM, None)  # Python delivers signals to the main thread only
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(steps[0]) == len(steps[1]) == max(published) >= 5  # the first step that all can stop after
    for stop in stops:
        assert stop and stop.here() and stop.signum == signal.SIGTERM
        with pytest.raises(Interrupted):
            stop.check()


def test_a_process_does_not_stop_before_the_others_know(two_processes):
    """If only one of them skipped an evaluation, the others would wait for it forever."""
    (stop, _), _ = two_processes
    stop.something_to_save = True
    stop._handle(signal.SIGTERM, None)
    assert stop.signum == signal.SIGTERM
    assert not stop and not stop.here()
    stop.check()


def test_an_error_while_processes_agree_ends_the_run(two_processes, monkeypatch):
    def fail(name, mine):
        raise UserError("that process hangs")

    monkeypatch.setattr(distributed, "exchange", fail)
    (stop, _), _ = two_processes
    with stop, pytest.raises(UserError, match="that process hangs"):
        stop.something_to_save = True
        stop._handle(signal.SIGTERM, None)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert not stop.here()
            time.sleep(0.005)
