"""The rows of a batch, made by a thread of this process or by worker processes that each own some of its lanes.

A worker is a new interpreter without JAX. It receives the `Parts` of the lanes once, then the positions to start from;
it sends rows endlessly, and the pipe blocks it while nobody reads. Only the `Parts`, which hold the user's functions,
are pickled, from parent to child.
"""

import collections
import contextlib
import json
import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from t5x.data import worker_process
from t5x.data.feature_converters import stack_rows
from t5x.data.lanes import Parts, join_states, lane_states, seek_lanes
from t5x.data.sources import BadExample
from t5x.errors import UserError

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
States = list[list[int]]


class Counts:
    """Counts of skipped examples and truncated features.

    Attributes:
      bad: number of bad examples that were skipped.
      trimmed: number of times each feature was truncated.
    """

    def __init__(self, bad: int = 0, trimmed: Mapping[str, int] | None = None):
        self.bad = bad
        self.trimmed: collections.Counter[str] = collections.Counter(trimmed or {})

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.bad + other.bad, self.trimmed + other.trimmed)

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.bad - other.bad, self.trimmed - other.trimmed)


class Made(NamedTuple):
    """A batch, the lane states after it, and the counts for it."""

    batch: Batch
    states: States
    counts: Counts


class LocalRows:
    """Rows made in this process."""

    def __init__(self, parts: Parts, rows: Sequence[int]):
        self._parts = parts
        self._lanes = parts.lanes(rows)

    def seek(self, states: States) -> None:
        seek_lanes(self._lanes, states)

    def states(self) -> States:
        return lane_states(self._lanes)

    def next(self) -> Made:
        before = self._counts()
        batch = stack_rows([lane.next_row() for lane in self._lanes])
        return Made(batch, lane_states(self._lanes), self._counts() - before)

    def close(self) -> None:
        pass

    def _counts(self) -> Counts:
        trimmed = sum((pipeline.trimmed for pipeline in self._parts.pipelines), self._parts.converter.trimmed)
        return Counts(self._parts.bad.count if self._parts.bad else 0, trimmed)


class WorkerRows:
    """Rows made by `count` processes; the i-th row belongs to worker i % count."""

    def __init__(self, parts: Parts, rows: Sequence[int], count: int):
        payload = worker_process.pickled(parts, "Set utils.DatasetConfig.num_workers=0")
        self._rows = list(rows)
        self._workers = [_Worker(payload, self._rows[number::count], number) for number in range(count)]
        self._count = count

    def seek(self, states: States) -> None:
        for worker in self._workers:
            worker.start(states)

    def next(self) -> Made:
        parts = [worker.receive() for worker in self._workers]
        batch = {}
        for name, first in parts[0].batch.items():
            batch[name] = np.empty((len(self._rows), *first.shape[1:]), first.dtype)
            for number, part in enumerate(parts):
                batch[name][number :: self._count] = part.batch[name]
        states = join_states(sorted(run for part in parts for run in part.states))
        return Made(batch, states, sum((part.counts for part in parts), Counts()))

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Worker:
    """The parent's end of a worker process."""

    def __init__(self, payload: bytes, rows: Sequence[int], number: int):
        self._rows = rows
        self._number = number
        self._generation = 0
        self._process = worker_process.start("t5x.data.batch_workers:serve")
        # Written from a thread because the child reads it only once it has started.
        self._writer = threading.Thread(target=self._send, args=(payload,), daemon=True)
        self._writer.start()

    def start(self, states: States) -> None:
        """Restart from `states`."""
        self._generation += 1
        mine = [run for run in states if any(run[0] <= row < run[0] + run[1] for row in self._rows)]
        message = {"generation": self._generation, "rows": list(self._rows), "states": mine}
        self._writer.join()
        self._writer = threading.Thread(target=self._send, args=(json.dumps(message).encode(),), daemon=True)
        self._writer.start()

    def receive(self) -> Made:
        while True:
            header, arrays = _read_message(self._process.stdout, self._died)
            if header.get("generation") != self._generation:
                continue  # made before the last `start`
            if "error" in header:
                raise {"bad": BadExample, "user": UserError}.get(header["kind"], RuntimeError)(header["error"])
            return Made(arrays, header["states"], Counts(header["bad"], header["trimmed"]))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unflushed data
                pipe.close()

    def _send(self, content: bytes) -> None:
        try:
            worker_process.write(self._process.stdin, content)
            self._process.stdin.flush()
        except (OSError, ValueError):
            pass  # it has died; `receive` reports it

    def _died(self) -> UserError:
        what = f"Worker process {self._number}, which reads the data,"
        fix = "With utils.DatasetConfig.num_workers=0 the data is read in this process."
        return worker_process.unexpected_end(self._process, what, fix)


# --- Worker side ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Run a worker."""
    source, output = worker_process.pipes()
    payload = worker_process.read(source)
    if payload is None:
        return
    commands = worker_process.listen(source)
    parts = None
    command = commands.get()
    while True:
        message = json.loads(command)
        command, generation = None, message["generation"]
        try:
            parts = worker_process.unpickled(payload) if parts is None else parts
            rows = LocalRows(parts, message["rows"])
            rows.seek(message["states"])
            while command is None:
                made = rows.next()
                header = {"states": made.states, "bad": made.counts.bad, "trimmed": made.counts.trimmed}
                _write_message(output, {"generation": generation, **header}, made.batch)
                command = _newest(commands)
        except BrokenPipeError:
            return
        except UserError as error:
            kind = "bad" if isinstance(error, BadExample) else "user"
            _write_message(output, {"generation": generation, "kind": kind, "error": str(error)}, {})
        except Exception:
            text = f"in a worker process:\n{traceback.format_exc()}"
            _write_message(output, {"generation": generation, "kind": "bug", "error": text}, {})
        command = commands.get() if command is None else command


def _newest(commands: queue.Queue) -> bytes | None:
    command = None
    while not commands.empty():
        command = commands.get()
    return command


# --- Messages: lengths, a JSON header, raw arrays ---------------------------------------------------------------------


def _write_message(stream: BinaryIO, header: dict[str, Any], arrays: Batch) -> None:
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    worker_process.write(stream, json.dumps({**header, "arrays": described}).encode())
    for array in arrays.values():
        stream.write(np.ascontiguousarray(array).data)
    stream.flush()


def _read_message(stream: BinaryIO, died: Callable[[], Exception]) -> tuple[dict[str, Any], Batch]:
    content = worker_process.read(stream)
    if content is None:
        raise died()
    header = json.loads(content)
    arrays = {}
    for name, dtype, shape in header.pop("arrays"):
        array = np.empty(shape, np.dtype(dtype))
        if stream.readinto(memoryview(array).cast("B")) != array.nbytes:
            raise died()
        arrays[name] = array
    return header, arrays


class Ahead:
    """Calls `produce` in a thread, at most `depth` results ahead."""

    def __init__(self, produce: Callable[[], Any], depth: int):
        self._results: queue.Queue = queue.Queue(depth)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(produce,), name="t5x-data", daemon=True)
        self._thread.start()

    def _run(self, produce: Callable[[], Any]) -> None:
        try:
            while not self._stopping.is_set():
                self._results.put((produce(), None))
        except BaseException as error:
            self._results.put((None, error))

    def get(self) -> Any:
        if self._error is None:
            result, self._error = self._results.get()
        if self._error is not None:
            raise self._error
        return result

    def stop(self, patience: float = math.inf) -> None:
        """Stop the thread after its current call; after `patience` seconds, stop waiting for it."""
        self._stopping.set()
        end = time.monotonic() + patience
        while self._thread.is_alive() and time.monotonic() < end:
            try:
                self._results.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)
