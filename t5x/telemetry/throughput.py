"""Honest throughput: a clock that stands still while the run evaluates or saves."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What was done in a stretch of a run, and how fast. Pauses are not in it.

    Attributes:
      seconds: time at work.
      steps, sequences, target_tokens: work done, over all devices.
      data_wait_seconds: part of `seconds` spent waiting for the next batch.
    """

    seconds: float
    steps: int
    sequences: int
    target_tokens: int
    data_wait_seconds: float

    @property
    def steps_per_second(self) -> float:
        return self._per_second(self.steps)

    @property
    def sequences_per_second(self) -> float:
        return self._per_second(self.sequences)

    @property
    def target_tokens_per_second(self) -> float:
        return self._per_second(self.target_tokens)

    @property
    def data_wait_share(self) -> float:
        """0: the devices never waited for data. Near 1: they do little else."""
        return self._per_second(self.data_wait_seconds)

    def scalars(self, *, cores: int) -> dict[str, float]:
        """The figures under T5X's names, to write as metrics. `cores`: number of devices over all processes."""
        return {
            "timing/seconds": self.seconds,
            "timing/seqs": self.sequences,
            "timing/steps_per_second": self.steps_per_second,
            "timing/seqs_per_second": self.sequences_per_second,
            "timing/seqs_per_second_per_core": self.sequences_per_second / cores,
            "timing/target_tokens_per_second": self.target_tokens_per_second,
            "timing/target_tokens_per_second_per_core": self.target_tokens_per_second / cores,
            "timing/data_wait_share": self.data_wait_share,
        }

    def _per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0


class ThroughputClock:
    """Measures a run in laps. It starts when it is made.

    Devices work asynchronously: wait for the result of the last step before `lap`, or the figures are of the
    dispatch.

        >>> clock = ThroughputClock()
        >>> with clock.waiting_for_data():
        ...     batch = [0] * 8
        >>> clock.add(steps=1, sequences=8, target_tokens=91)
        >>> with clock.paused():
        ...     pass  # evaluate, save
        >>> clock.lap().steps
        1

    Args:
      now: the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._born = now()
        self._pauses = 0
        self._begin_lap(self._born)

    def add(self, *, steps: int = 1, sequences: int, target_tokens: int) -> None:
        """Counts work done."""
        self._steps += steps
        self._sequences += sequences
        self._target_tokens += target_tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count. Pauses may be nested."""
        if self._pauses == 0:
            self._worked += self._now() - self._resumed
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._resumed = self._now()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time inside counts as work and as waiting; inside a pause, as neither."""
        began = self._now()
        try:
            yield
        finally:
            if self._pauses == 0:
                self._waited += self._now() - began

    def lap(self) -> Throughput:
        """The figures since the last lap or the start; begins the next lap."""
        now = self._now()
        seconds = self._worked + (now - self._resumed if self._pauses == 0 else 0.0)
        figures = Throughput(seconds, self._steps, self._sequences, self._target_tokens, self._waited)
        self._begin_lap(now)
        return figures

    def uptime(self) -> float:
        """Seconds since the clock was made, pauses included."""
        return self._now() - self._born

    def _begin_lap(self, now: float) -> None:
        self._resumed = now
        self._worked = self._waited = 0.0
        self._steps = self._sequences = self._target_tokens = 0
