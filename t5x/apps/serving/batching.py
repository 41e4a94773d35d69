"""Compute the rows of many requests in shared batches, in one thread.

While a batch is computed, new rows wait. The next batch takes the shape of which most rows wait, unless others have
waited for several batches. If fewer rows wait than were computed or waited when the last batch ended, it first waits
for those clients' next requests, at most `max_wait` seconds. Otherwise clients would split into groups that take turns,
each in a batch of its own.
"""

import contextvars
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

# A batch costs the same for few and for many rows, so it may wait for this share of the time that it takes.
_WAIT_SHARE = 0.5
_OVERDUE = 4  # batches, by the time of the last one, after which a row is computed before larger groups


class CancelledCall(Exception):
    """The client has disconnected, or the request timed out."""


class Call:
    """A request in progress.

    Args:
      seconds: time limit.

    Attributes:
      cancelled: whether the client has gone or the time is over. Its waiting rows are dropped.
    """

    def __init__(self, seconds: float):
        self.deadline = time.monotonic() + seconds
        self.cancelled = False
        self.changed = threading.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self.changed.set()


Compute = Callable[[Any, Sequence["BatchRow"]], Sequence[Any]]
_Group = tuple[Compute, Hashable]
CURRENT_CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("current_call")


@dataclasses.dataclass(eq=False)
class BatchRow:
    """One row of a batch.

    Attributes:
      group: rows with an equal group can be computed together.
      example: {feature: ids}.
      values: more numbers of the row, see `Engine.run`.
      index: keys random numbers, see `Engine.run`.
      result: the result, once `done`; an exception if computing failed.
    """

    group: Hashable
    example: Mapping[str, Sequence[int]]
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    index: int = 0
    result: Any = None
    done: bool = False
    call: Call | None = None
    since: float = 0.0

    @property
    def is_cancelled(self) -> bool:
        return self.call is not None and self.call.cancelled


class Batcher:
    """A queue of rows and the thread that computes them.

    Args:
      max_rows: maximum number of rows in a batch.
      max_wait: seconds that an incomplete batch waits for more rows.
      observe: called after every batch with its group, number of rows and seconds.
    """

    def __init__(self, max_rows: int, max_wait: float, observe: Callable[[Any, int, float], None]):
        self.max_rows = max_rows
        self._max_wait = max_wait
        self._observe = observe
        self._changed = threading.Condition()
        self._waiting: dict[_Group, deque[BatchRow]] = {}
        self._seconds: dict[Hashable, float] = {}  # that the last batch of a group took
        self._last_seconds = 0.0  # that the last batch of any group took
        self._expected = 1  # rows that were computed or waited when the last batch ended
        self._free_since = 0.0  # when the last batch ended
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def run(self, compute: Compute, rows: Sequence[BatchRow]) -> list[Any]:
        """Return the result of each row. Blocks until all are computed.

        Args:
          compute: (group, rows) -> results; rows are only computed together with those of the same function.

        Raises:
          CancelledCall: the current call was cancelled or timed out.
        """
        call = CURRENT_CALL.get()
        with self._changed:
            for row in rows:
                row.call, row.since = call, time.monotonic()
                self._waiting.setdefault((compute, row.group), deque()).append(row)
            self._changed.notify()
        while not call.cancelled and not all(row.done for row in rows):
            if not call.changed.wait(max(0.0, call.deadline - time.monotonic())):
                call.cancel()
            if not call.cancelled:
                call.changed.clear()
        if call.cancelled:
            raise CancelledCall
        for row in rows:
            if isinstance(row.result, Exception):
                raise row.result
        return [row.result for row in rows]

    def waiting(self) -> int:
        """Return the number of rows in the queue."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def close(self) -> None:
        """End the thread after all waiting rows."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            self._compute(*batch)
            del batch  # a replaced model is freed while the thread waits

    def _compute(self, group: "_Group", rows: Sequence[BatchRow]) -> None:
        compute, key = group
        began = time.monotonic()
        try:
            results = compute(key, rows)
        except Exception as error:
            results = [error] * len(rows)
        seconds = time.monotonic() - began
        self._seconds[key] = self._last_seconds = seconds
        self._observe(key, len(rows), seconds)
        self._expected, self._free_since = len(rows) + self.waiting(), time.monotonic()
        for row, result in zip(rows, results, strict=True):
            row.result, row.done = result, True
            if row.call is not None:
                row.call.changed.set()

    def _take(self) -> tuple["_Group", list[BatchRow]] | None:
        """Wait for the next batch and remove it from the queue; None if closed."""
        with self._changed:
            while (group := self._next_group()) is None:
                if self._is_closed:
                    return None
                self._changed.wait(self._wait_seconds())
            waiting = self._waiting[group]
            rows = [waiting.popleft() for _ in range(min(self.max_rows, len(waiting)))]
            if not waiting:
                del self._waiting[group]
            return group, rows

    def _next_group(self) -> "_Group | None":
        """Return the group to compute now: the largest, or one that is overdue; None to wait for rows."""
        for group, rows in list(self._waiting.items()):
            if any(row.is_cancelled for row in rows):
                self._waiting[group] = rows = deque(row for row in rows if not row.is_cancelled)
            if not rows:
                del self._waiting[group]
        if not self._waiting:
            return None
        since = {group: rows[0].since for group, rows in self._waiting.items()}
        oldest = min(since, key=since.__getitem__)
        if time.monotonic() - since[oldest] > _OVERDUE * self._last_seconds:
            return oldest
        sizes = {group: min(self.max_rows, len(rows)) for group, rows in self._waiting.items()}
        largest = max(sizes, key=lambda group: (sizes[group], -since[group]))
        return largest if sizes[largest] == self.max_rows or self._wait_seconds() == 0 else None

    def _wait_seconds(self) -> float | None:
        """Return the seconds for which to wait for more rows; None if there are none at all."""
        if not self._waiting:
            return None
        if self._is_closed or sum(map(len, self._waiting.values())) >= min(self.max_rows, self._expected):
            return 0
        group, rows = min(self._waiting.items(), key=lambda item: item[1][0].since)
        wait = min(self._max_wait, _WAIT_SHARE * self._seconds.get(group[1], 0.0))
        return max(0.0, max(rows[0].since, self._free_since) + wait - time.monotonic())
