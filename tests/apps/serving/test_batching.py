"""Batches of rows from many threads, without a model."""

import contextvars
import threading
import time

import pytest

from t5x.apps.serving.batching import CURRENT_CALL, Batcher, BatchRow, Call, CancelledCall


class Doubler:
    """Doubles the first input of each row; the first batch waits for `go`."""

    def __init__(self):
        self.batches = []
        self.go = threading.Event()
        self.started = threading.Event()

    def __call__(self, group, rows):
        self.started.set()
        self.go.wait(10)
        self.batches.append((group, [row.example["inputs"][0] for row in rows]))
        if group == "bad":
            raise ArithmeticError("broken")
        return [2 * row.example["inputs"][0] for row in rows]


@pytest.fixture
def compute():
    made = Doubler()
    yield made
    made.go.set()


@pytest.fixture
def batcher():
    made = Batcher(max_rows=4, max_wait=0.05, observe=lambda group, rows, seconds: None)
    yield made
    made.close()


def start(batcher, compute, numbers, group="a", call=None):
    """Runs rows in a thread; returns the thread and the place of their results."""
    found = {}

    def run():
        CURRENT_CALL.set(call or Call(20))
        try:
            found["results"] = batcher.run(compute, [BatchRow(group, {"inputs": [n]}) for n in numbers])
        except Exception as error:
            found["error"] = error

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    return thread, found


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rows_that_come_while_a_batch_is_computed_are_computed_together(batcher, compute):
    threads = [start(batcher, compute, [0])]
    compute.started.wait(10)
    for i in range(1, 7):
        threads.append(start(batcher, compute, [i], group="a" if i < 6 else "b"))
        wait_until(lambda i=i: batcher.waiting() == i)
    compute.go.set()
    for i, (thread, found) in enumerate(threads):
        thread.join(10)
        assert found == {"results": [2 * i]}
    assert compute.batches[:2] == [("a", [0]), ("a", [1, 2, 3, 4])]
    assert sorted(compute.batches[2:]) == [("a", [5]), ("b", [6])]


def test_a_full_batch_goes_before_an_older_incomplete_one(batcher, compute):
    threads = [start(batcher, compute, [0])]
    compute.started.wait(10)
    threads.append(start(batcher, compute, [1], group="b"))
    wait_until(lambda: batcher.waiting() == 1)
    threads.append(start(batcher, compute, [2, 3, 4, 5]))
    wait_until(lambda: batcher.waiting() == 5)
    compute.go.set()
    for thread, _ in threads:
        thread.join(10)
    assert [group for group, _ in compute.batches] == ["a", "a", "b"]


def test_full_batches_do_not_starve_a_lone_row_of_another_shape():
    batches = []

    def compute(group, rows):
        batches.append(group)
        time.sleep(0.02)
        return [0] * len(rows)

    batcher = Batcher(max_rows=4, max_wait=0.1, observe=lambda *_: None)
    stop = threading.Event()

    def client():
        CURRENT_CALL.set(Call(30))
        while not stop.is_set():
            batcher.run(compute, [BatchRow("a", {"inputs": [1]})])

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(client,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(batches) > 5)
    before = len(batches)
    lone, found = start(batcher, compute, [1], group="b")
    lone.join(20)
    after = len(batches)
    stop.set()
    for thread in threads:
        thread.join(20)
    batcher.close()
    assert "results" in found and after - before < 30


def test_a_lone_row_does_not_wait_for_others(compute):
    batcher = Batcher(max_rows=4, max_wait=5, observe=lambda *_: None)
    compute.go.set()
    began = time.monotonic()
    for i in range(3):
        thread, found = start(batcher, compute, [i])
        thread.join(10)
        assert found == {"results": [2 * i]}
    assert time.monotonic() - began < 4
    batcher.close()


def test_returning_clients_join_the_waiting_ones():
    """Four clients that began as one and three: from the third batch on, they are computed together."""
    sizes = []

    def compute(group, rows):
        sizes.append(len(rows))
        time.sleep(0.2)
        return [0] * len(rows)

    batcher = Batcher(max_rows=4, max_wait=1, observe=lambda *_: None)

    def client(delay):
        time.sleep(delay)
        CURRENT_CALL.set(Call(20))
        for _ in range(5):
            batcher.run(compute, [BatchRow("a", {"inputs": [1]})])

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(client, delay)) for delay in (0, 0.1, 0.1, 0.1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    batcher.close()
    assert sizes[0] == 1 and sizes[1:5] == [4, 4, 4, 4]


def test_waiting_rows_of_a_cancelled_call_are_not_computed(batcher, compute):
    first = start(batcher, compute, [0])
    compute.started.wait(10)
    call = Call(20)
    dropped, kept = start(batcher, compute, [1, 2], call=call), start(batcher, compute, [3])
    wait_until(lambda: batcher.waiting() == 3)
    call.cancel()
    dropped[0].join(10)
    assert isinstance(dropped[1]["error"], CancelledCall)
    compute.go.set()
    first[0].join(10), kept[0].join(10)
    assert kept[1] == {"results": [6]}
    assert compute.batches == [("a", [0]), ("a", [3])]


def test_a_call_ends_at_its_deadline(batcher, compute):
    thread, found = start(batcher, compute, [1], call=Call(0.1))
    thread.join(10)
    assert isinstance(found["error"], CancelledCall)


def test_an_error_reaches_its_own_rows_only(batcher, compute):
    compute.go.set()
    bad, good = start(batcher, compute, [1], group="bad"), start(batcher, compute, [2])
    bad[0].join(10), good[0].join(10)
    assert isinstance(bad[1]["error"], ArithmeticError) and good[1] == {"results": [4]}


def test_closing_computes_the_waiting_rows(compute):
    batcher = Batcher(max_rows=4, max_wait=5, observe=lambda *_: None)
    threads = [start(batcher, compute, [0])]
    compute.started.wait(10)
    threads.append(start(batcher, compute, [1, 2, 3, 4, 5, 6]))
    wait_until(lambda: batcher.waiting() == 6)
    compute.go.set()
    batcher.close()
    for thread, found in threads:
        thread.join(10)
        assert "results" in found


def test_closing_returns_only_after_the_batch_in_progress(compute):
    batcher = Batcher(max_rows=4, max_wait=0, observe=lambda *_: None)
    thread, _ = start(batcher, compute, [1])
    assert compute.started.wait(10)
    threading.Timer(0.3, compute.go.set).start()
    batcher.close()
    assert compute.batches == [("a", [1])]
    thread.join(10)
