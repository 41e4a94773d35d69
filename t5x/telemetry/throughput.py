"""Honest throughput: a clock that stands still while the run evaluates or saves, and the share of time put to use."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What was done in a stretch of a run, and how fast. Pauses are not in it.

    Attributes:
      seconds: time at work.
      steps, sequences, target_tokens, input_tokens: work done, over all devices; padding is no token.
      data_wait_seconds: part of `seconds` spent waiting for the next batch.
    """

    seconds: float
    steps: int
    sequences: int
    target_tokens: int
    data_wait_seconds: float
    input_tokens: int = 0

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
    def input_tokens_per_second(self) -> float:
        return self._per_second(self.input_tokens)

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
            "timing/input_tokens_per_second": self.input_tokens_per_second,
            "timing/data_wait_share": self.data_wait_share,
        }

    def _per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0


class ThroughputClock:
    """Measures a run in laps, from its beginning: make the clock first, and `start` it before the first step.

    Devices work asynchronously: `add` a step once its result is there, or the figures are of the dispatch.

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
      now: the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._born = now()
        self._pauses = 0
        self._in_steps = 0.0
        self._notes: dict[str, float] = {}
        self._begin_lap(self._born)

    def start(self) -> None:
        """Begins the first lap: what was before it are preparations."""
        self._begin_lap(self._now())

    def add(self, *, steps: int = 1, sequences: int, target_tokens: int, input_tokens: int = 0) -> None:
        """Counts work done."""
        self._steps += steps
        self._sequences += sequences
        self._target_tokens += target_tokens
        self._input_tokens += input_tokens

    @property
    def is_new(self) -> bool:
        """Whether nothing is counted in this lap yet."""
        return self._steps == 0

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
    def apart(self, name: str) -> Iterator[None]:
        """A pause whose seconds are noted under the name of a metric."""
        began = self._now()
        with self.paused():
            yield
        self._notes[name] = self._notes.get(name, 0.0) + self._now() - began

    def notes(self) -> dict[str, float]:
        """What `apart` noted since the last call, to write as metrics."""
        notes, self._notes = self._notes, {}
        return notes

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
        figures = Throughput(
            seconds, self._steps, self._sequences, self._target_tokens, self._waited, self._input_tokens
        )
        self._in_steps += seconds - self._waited
        self._begin_lap(now)
        return figures

    def uptime(self) -> float:
        """Seconds since the clock was made, pauses included."""
        return self._now() - self._born

    def goodput(self) -> float:
        """The share of the time from the making of the clock to the last lap that went into steps.

        Into steps goes what the laps count, less the waiting for data: not preparations (restoring, compiling), not
        evaluation, saving and other pauses, and nothing of earlier processes of the same run. Steps that are lost when
        a run is killed had counted as good.
        """
        life = self._lap_began - self._born
        return self._in_steps / life if life > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """The figures of the whole run so far; ask after `lap`."""
        return {"timing/uptime": self.uptime(), "timing/goodput": self.goodput()}

    def _begin_lap(self, now: float) -> None:
        self._lap_began = self._resumed = now
        self._worked = self._waited = 0.0
        self._steps = self._sequences = self._target_tokens = self._input_tokens = 0
