"""Throughput: a clock that stops during evaluation and saving, and the share of time spent on training steps."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Throughput:
    """The work done in a lap of a run, excluding pauses.

    Attributes:
      seconds: working time.
      steps, sequences, target_tokens, input_tokens: work done on all devices; padding is not counted.
      data_wait_seconds: part of `seconds` spent waiting for the next batch.
    """

    seconds: float
    steps: int
    sequences: int
    target_tokens: int
    data_wait_seconds: float
    input_tokens: int = 0

    def scalars(self, *, cores: int) -> dict[str, float]:
        """Return the metrics under T5X's names; rates of an empty lap are 0.

        Args:
          cores: number of devices of all processes.
        """

        def rate(amount: float) -> float:
            return amount / self.seconds if self.seconds > 0 else 0.0

        return {
            "timing/seconds": self.seconds,
            "timing/seqs": self.sequences,
            "timing/steps_per_second": rate(self.steps),
            "timing/seqs_per_second": rate(self.sequences),
            "timing/seqs_per_second_per_core": rate(self.sequences) / cores,
            "timing/target_tokens_per_second": rate(self.target_tokens),
            "timing/target_tokens_per_second_per_core": rate(self.target_tokens) / cores,
            "timing/input_tokens_per_second": rate(self.input_tokens),
            "timing/data_wait_share": rate(self.data_wait_seconds),  # near 1: the devices do little but wait
        }


class ThroughputClock:
    """Measures a run in laps: create it when the run starts, and `start` it before the first step.

    Devices work asynchronously: `add` a step when its result is ready, or the dispatch is measured.

        >>> clock = ThroughputClock()
        >>> with clock.apart("timing/compilation_seconds"):
        ...     pass  # compile
        >>> clock.start()
        >>> with clock.waiting_for_data():
        ...     batch = [0] * 8
        >>> clock.add(steps=1, sequences=8, target_tokens=91)
        >>> with clock.apart("timing/evaluate_seconds"):
        ...     pass  # evaluate
        >>> clock.lap().steps
        1
        >>> sorted(clock.notes())
        ['timing/compilation_seconds', 'timing/evaluate_seconds']

    Args:
      now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._created = now()
        self._resumed: float = self._created
        self._pauses = 0
        self._in_steps = 0.0
        self._notes: dict[str, float] = {}
        self._begin_lap(self._created)

    def start(self) -> None:
        """Start the first lap; the time before it is preparation."""
        self._begin_lap(self._now())

    def add(self, *, steps: int = 1, **work: int) -> None:
        """Count finished work: `sequences`, `target_tokens` and `input_tokens`; see `Throughput`."""
        for name, amount in {"steps": steps, **work}.items():
            self._work[name] += amount

    @property
    def is_new(self) -> bool:
        """Whether this lap has no steps yet."""
        return self._work["steps"] == 0

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Exclude the time inside from the lap, and record it as a metric. Pauses may be nested."""
        started = self._now()
        if self._pauses == 0:
            self._worked += started - self._resumed
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._resumed = self._now()
        self._notes[name] = self._notes.get(name, 0.0) + self._now() - started

    def notes(self) -> dict[str, float]:
        """Return the metrics that `apart` recorded since the last call."""
        notes, self._notes = self._notes, {}
        return notes

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as work and as waiting; inside a pause, as neither."""
        started = self._now()
        try:
            yield
        finally:
            if self._pauses == 0:
                self._waited += self._now() - started

    def lap(self) -> Throughput:
        """Return the work since the last lap, or the start, and start the next lap."""
        now = self._now()
        seconds = self._worked + (now - self._resumed if self._pauses == 0 else 0.0)
        lap = Throughput(seconds=seconds, data_wait_seconds=self._waited, **self._work)
        self._in_steps += seconds - self._waited
        self._begin_lap(now)
        return lap

    def scalars(self) -> dict[str, float]:
        """Return the metrics of the whole run so far; call it after `lap`.

        Returns:
          "timing/uptime": seconds since the clock was created, including pauses. "timing/goodput": share of the time
          from then to the last lap that was spent on steps. That excludes preparation (restoring, compiling), waiting
          for data, pauses such as evaluation and saving, and earlier processes of the same run. Steps that are lost
          when a run is killed have been counted.
        """
        total = self._lap_started - self._created
        goodput = self._in_steps / total if total > 0 else 0.0
        return {"timing/uptime": self._now() - self._created, "timing/goodput": goodput}

    def _begin_lap(self, now: float) -> None:
        self._lap_started = self._resumed = now
        self._worked = self._waited = 0.0
        self._work = dict.fromkeys(("steps", "sequences", "target_tokens", "input_tokens"), 0)
