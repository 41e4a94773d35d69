"""Which silence ends a run, and whose error a process reports when several end at once."""

import itertools
import os
import socket
import threading
import time
import types

import pytest

from t5x.partitioning import watch
from t5x.partitioning.rendezvous import Channel, Member
from t5x.partitioning.watch import PeerWatcher


class Watching:
    """A watcher whose connections stay open and silent. `ended` has the messages with which it would end the run."""

    def __init__(self, count: int, me: int = 0):
        members = [Member(n, count, f"host{n}", n, f"machine{n}", "") for n in range(count)]
        pairs = {n: socket.socketpair() for n in range(count) if n != me}
        self.far_ends = [far for _, far in pairs.values()]
        self.channels = {n: Channel(near, b"", leads=me == 0) for n, (near, _) in pairs.items()}
        self.watcher = PeerWatcher(me, members, self.channels)
        self.ended: list[str] = []

    def start(self) -> None:
        """Run the watcher in a thread, and record how it would end the run."""

        def record(index: int, text: str, code: int) -> None:
            assert code == watch.DIED
            self.ended.append(text)
            self.watcher._all_done.set()

        self.watcher._end = record
        self.watcher.start()

    def close(self) -> None:
        self.watcher._all_done.set()
        if self.watcher.is_alive():
            self.watcher.join(20)
        for end in (*self.channels.values(), *self.far_ends):
            end.close()


@pytest.fixture
def exits(monkeypatch):
    """Record with which message and code a process would exit."""
    printed, exits = [], []
    monkeypatch.setattr(watch, "print_now", printed.append)
    monkeypatch.setattr(os, "_exit", lambda code: exits.append((printed.pop(), code)))
    return exits


@pytest.mark.parametrize("reports", [True, False])
def test_a_process_reports_its_own_error_rather_than_that_of_another(exits, reports, monkeypatch):
    """As when all fail for the same reason, and the news of the first arrives before the others' own errors."""
    monkeypatch.setattr(watch, "OWN_ERROR_SECONDS", 20.0 if reports else 0.1)
    watching = Watching(2, me=1)
    try:
        message = {"error": "process 0 ended, and the run with it: the file is missing", "code": 2}
        handling = threading.Thread(target=watching.watcher._receive_message, args=(0, message))
        handling.start()
        time.sleep(0.3)
        if reports:
            watching.watcher.report("the file is missing", 2)
        handling.join(20)
        assert not handling.is_alive()
        assert exits == ([] if reports else [(f"error: {message['error']}", 2)])
    finally:
        watching.close()


def test_the_death_of_another_process_is_reported_at_once(exits, monkeypatch):
    monkeypatch.setattr(watch, "OWN_ERROR_SECONDS", 1000.0)
    watching = Watching(2, me=1)
    try:
        watching.far_ends[0].close()
        watching.watcher.run()
        ((text, code),) = exits
        assert text.startswith("error: process 0 (host host0, pid 0) died or lost its network. ")
        assert code == watch.DIED
    finally:
        watching.close()


@pytest.fixture
def clock(monkeypatch):
    """Replace the watcher's clock. Silence counts after 5 seconds."""
    monkeypatch.setattr(watch, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(watch, "PEER_SILENCE_SECONDS", 5.0)

    def replace(now):
        monkeypatch.setattr(watch, "time", types.SimpleNamespace(monotonic=now))

    return replace


def test_own_pause_is_not_the_silence_of_others(clock):
    """As when this process was stopped, or its machine was suspended, for longer than a silence may last."""
    offset, looks = 0.0, threading.Semaphore(0)

    def now():
        looks.release()
        return time.monotonic() + offset

    clock(now)
    watching = Watching(2)
    watching.start()
    try:
        assert all(looks.acquire(timeout=20) for _ in range(3))
        offset = 100.0
        assert all(looks.acquire(timeout=20) for _ in range(5))
        assert watching.ended == []
    finally:
        watching.close()


def test_processes_that_fall_silent_up_to_a_heartbeat_apart_are_named_together(clock):
    times = itertools.count(0, 0.1)
    clock(lambda: next(times))
    watching = Watching(4)
    watching.channels[1].silent, watching.channels[2].silent = 4.85, 4.75
    watching.start()
    try:
        assert watching.watcher._all_done.wait(20)
        (text,) = watching.ended
        assert "received nothing for 5 s from process 1 (host host1, pid 1), process 2 (host host2, pid 2): " in text
        assert "process 3" not in text
    finally:
        watching.close()


def test_the_watcher_has_no_method_that_a_thread_of_a_newer_python_overwrites():
    # Threads assign these attributes to themselves: the last since Python 3.13, where methods of that name are lost.
    assigned = {*vars(threading.Thread()), "_handle", "_os_thread_handle"}
    assert not assigned & {name for name in vars(PeerWatcher) if not name.startswith("__")}
