"""Computes jobs of many requests in common batches, in one thread.

While a batch is computed, new jobs wait. The next batch takes the shape of which most jobs wait, unless others have
waited for several batches. If fewer jobs wait than were computed or waited when the last batch ended, it first waits
for those clients to come again, at most `max_wait` seconds. Otherwise clients would split into groups that take turns,
each in a batch of its own.
"""

import contextvars
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

# A batch costs the same for few and for many jobs, so it may wait for this share of the time that it takes.
_WAIT_SHARE = 0.5
_OVERDUE = 4  # batches, by the time of the last one, after which a job is computed before larger groups


class CancelledCall(Exception):
    """The client has disconnected, or its time is over."""


class Call:
    """A request of a client while it is being answered.

    Args:
      seconds: time limit.

    Attributes:
      cancelled: whether nobody waits for the answer. Its waiting jobs are dropped.
    """

    def __init__(self, seconds: float):
        self.deadline = time.monotonic() + seconds
        self.cancelled = False
        self.changed = threading.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self.changed.set()


Compute = Callable[[Any, Sequence["Job"]], Sequence[Any]]
_Group = tuple[Compute, Hashable]
CURRENT_CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("current_call")


@dataclasses.dataclass(eq=False)
class Job:
    """One row of a batch.

    Attributes:
      group: jobs with an equal group can be computed together.
      example: {feature: ids}.
      values: further numbers of the row, see `Engine.run`.
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
    """A queue of jobs and the thread that computes them.

    Args:
      rows: maximum number of jobs in a batch.
      max_wait: seconds that an incomplete batch waits for more jobs.
      observe: called after every batch with its group, number of jobs and seconds.
    """

    def __init__(self, rows: int, max_wait: float, observe: Callable[[Any, int, float], None]):
        self.rows = rows
        self._max_wait = max_wait
        self._observe = observe
        self._changed = threading.Condition()
        self._waiting: dict[_Group, deque[Job]] = {}
        self._seconds: dict[Hashable, float] = {}  # that the last batch of a group took
        self._last_seconds = 0.0  # that the last batch of any group took
        self._expected = 1  # jobs that were computed or waited when the last batch ended
        self._free_since = 0.0  # when the last batch ended
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def run(self, compute: Compute, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job. Blocks until all are computed.

        Args:
          compute: (group, jobs) -> results; jobs are only computed together with those of the same function.

        Raises:
          CancelledCall: the current call was cancelled, or its time is over.
        """
        call = CURRENT_CALL.get()
        with self._changed:
            for job in jobs:
                job.call, job.since = call, time.monotonic()
                self._waiting.setdefault((compute, job.group), deque()).append(job)
            self._changed.notify()
        while not call.cancelled and not all(job.done for job in jobs):
            if not call.changed.wait(max(0.0, call.deadline - time.monotonic())):
                call.cancel()
            if not call.cancelled:
                call.changed.clear()
        if call.cancelled:
            raise CancelledCall
        for job in jobs:
            if isinstance(job.result, Exception):
                raise job.result
        return [job.result for job in jobs]

    def waiting(self) -> int:
        """Return the number of jobs in the queue."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def close(self) -> None:
        """End the thread after all waiting jobs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            self._compute(*taken)
            del taken  # a replaced model is freed while the thread waits

    def _compute(self, group: "_Group", jobs: Sequence[Job]) -> None:
        compute, of_function = group
        began = time.monotonic()
        try:
            results = compute(of_function, jobs)
        except Exception as error:
            results = [error] * len(jobs)
        seconds = time.monotonic() - began
        self._seconds[of_function] = self._last_seconds = seconds
        self._observe(of_function, len(jobs), seconds)
        self._expected, self._free_since = len(jobs) + self.waiting(), time.monotonic()
        for job, result in zip(jobs, results, strict=True):
            job.result, job.done = result, True
            if job.call is not None:
                job.call.changed.set()

    def _take(self) -> tuple["_Group", list[Job]] | None:
        """Wait for the next batch and remove it from the queue; None if closed."""
        with self._changed:
            while (group := self._next_group()) is None:
                if self._is_closed:
                    return None
                self._changed.wait(self._patience())
            waiting = self._waiting[group]
            jobs = [waiting.popleft() for _ in range(min(self.rows, len(waiting)))]
            if not waiting:
                del self._waiting[group]
            return group, jobs

    def _next_group(self) -> "_Group | None":
        """Return the group to compute now: the largest, or one that is overdue; None to wait for jobs."""
        for group, jobs in list(self._waiting.items()):
            if any(job.is_cancelled for job in jobs):
                self._waiting[group] = jobs = deque(job for job in jobs if not job.is_cancelled)
            if not jobs:
                del self._waiting[group]
        if not self._waiting:
            return None
        since = {group: jobs[0].since for group, jobs in self._waiting.items()}
        oldest = min(since, key=since.__getitem__)
        if time.monotonic() - since[oldest] > _OVERDUE * self._last_seconds:
            return oldest
        sizes = {group: min(self.rows, len(jobs)) for group, jobs in self._waiting.items()}
        largest = max(sizes, key=lambda group: (sizes[group], -since[group]))
        return largest if sizes[largest] == self.rows or self._patience() == 0 else None

    def _patience(self) -> float | None:
        """Return the seconds for which to wait for more jobs; None if there are none at all."""
        if not self._waiting:
            return None
        if self._is_closed or sum(map(len, self._waiting.values())) >= min(self.rows, self._expected):
            return 0
        group, jobs = min(self._waiting.items(), key=lambda item: item[1][0].since)
        wait = min(self._max_wait, _WAIT_SHARE * self._seconds.get(group[1], 0.0))
        return max(0.0, max(jobs[0].since, self._free_since) + wait - time.monotonic())
