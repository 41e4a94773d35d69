"""The rows of a batch, made by a thread of this process or by worker processes that each own some of its lanes.

A worker receives the `LaneConfig` once, then the positions to start from. It sends rows endlessly; the pipe blocks it
while nobody reads.
"""

import dataclasses
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x.data import worker_process
from t5x.data.feature_converters import stack_rows
from t5x.data.lanes import LaneConfig, join_states, states_of_rows

Batch = dict[str, np.ndarray]
States = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of skipped examples and truncated features.

    Attributes:
      bad: number of bad examples that were skipped.
      trimmed: number of times each feature was truncated.
    """

    bad: int = 0
    trimmed: Counter[str] = dataclasses.field(default_factory=Counter)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.bad + other.bad, self.trimmed + other.trimmed)

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.bad - other.bad, self.trimmed - other.trimmed)


class BuiltBatch(NamedTuple):
    """A batch, the lane states after it, and the counts for it."""

    batch: Batch
    states: States
    counts: Counts


class LocalRows:
    """Rows made in this process."""

    def __init__(self, config: LaneConfig, rows: Sequence[int]):
        self._config = config
        self._lanes = config.lanes(rows)

    def seek(self, states: States) -> None:
        mine = states_of_rows([lane.row for lane in self._lanes], states)
        for lane, (_, _, *state) in zip(self._lanes, mine, strict=True):
            lane.seek(state)

    def states(self) -> States:
        return join_states([lane.row, 1, *lane.state()] for lane in self._lanes)

    def next(self) -> BuiltBatch:
        before = self._counts()
        batch = stack_rows([lane.next_row() for lane in self._lanes])
        return BuiltBatch(batch, self.states(), self._counts() - before)

    def close(self) -> None:
        pass

    def _counts(self) -> Counts:
        trimmed = sum((pipeline.trimmed for pipeline in self._config.pipelines), self._config.converter.trimmed)
        return Counts(self._config.bad.count, trimmed)


class WorkerRows:
    """Rows made by `count` processes; the i-th row belongs to worker i % count."""

    def __init__(self, config: LaneConfig, rows: Sequence[int], count: int):
        work = worker_process.pickled(config, "Set utils.DatasetConfig.num_workers=0")
        fix = "Set utils.DatasetConfig.num_workers=0 to read the data in this process."
        self._rows = [list(rows[number::count]) for number in range(count)]
        self._workers = [
            worker_process.Worker(send_rows, work, f"Data worker process {number}", fix) for number in range(count)
        ]
        self._start: States | None = None

    def seek(self, states: States) -> None:
        self._start = states  # `next` sends it, because sending waits for the workers to start

    def next(self) -> BuiltBatch:
        if self._start is not None:
            for worker, rows in zip(self._workers, self._rows, strict=True):
                worker.send([rows, self._start])
            self._start = None
        answers = (worker.receive() for worker in self._workers)
        parts = [BuiltBatch(batch, states, Counts(bad, Counter(trimmed))) for batch, states, bad, trimmed in answers]
        batch = {}
        for name, first in parts[0].batch.items():
            batch[name] = np.empty((sum(map(len, self._rows)), *first.shape[1:]), first.dtype)
            for number, part in enumerate(parts):
                batch[name][number :: len(parts)] = part.batch[name]
        states = join_states(sorted(run for part in parts for run in part.states))
        return BuiltBatch(batch, states, sum((part.counts for part in parts), Counts()))

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


def send_rows(config: LaneConfig, command: tuple[list[int], States], parent: worker_process.Parent) -> None:
    """Send rows endlessly, in a worker.

    Args:
      command: the numbers of the rows, and the states to start from.
    """
    numbers, start = command
    rows = LocalRows(config, numbers)
    rows.seek(start)
    while not parent.has_command():
        batch, states, counts = rows.next()
        parent.send([batch, states, counts.bad, counts.trimmed])


class Prefetcher:
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
