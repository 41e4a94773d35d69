"""Progress of a long run: a bar on a terminal, occasional lines in a log file."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

_BAR = "{percentage:3.0f}%|{bar}| {n}/{total}, {remaining} left{postfix}"
_WORTH_SHOWING = 10**7  # bytes to copy

# A closed pipe (Ctrl-C also ends a `tee` that reads it) must not end the run.
_IGNORE_CLOSED = contextlib.suppress(OSError, ValueError)


class Progress(contextlib.AbstractContextManager):
    """Shows how far a run is.

    On a terminal it is a bar with the step, metrics and remaining time. Elsewhere (a file, a pipe, the log of a batch
    scheduler) it prints lines: the first and the last update, and at most one every `seconds_between_lines`.

        >>> with Progress(1000, description="train", stream=sys.stdout) as progress:
        ...     progress.update(1, loss=5.52, **{"tokens/s": 34000})
        train: step 1/1000, loss 5.52, tokens/s 34,000

    Args:
      total: the last step, or None if unknown.
      initial: the step it starts from.
      unit: name of a step.
      description: name of the work.
      stream: where to print; None is standard error.
      disable: show nothing.
      seconds_between_lines: for streams that are not terminals.
      now: returns the time in seconds.
    """

    def __init__(
        self,
        total: int | None,
        initial: int = 0,
        unit: str = "step",
        description: str = "",
        stream: TextIO | None = None,
        *,
        disable: bool = False,
        seconds_between_lines: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self._step = initial
        stream = sys.stderr if stream is None else stream
        if disable:
            self._display = None
        elif stream.isatty() and os.environ.get("TERM") != "dumb":
            self._display = _Bar(total, initial, unit, description, stream)
        else:
            head = f"{description}: {unit}" if description else unit
            self._display = _Lines(total, initial, head, stream, seconds_between_lines, now)

    def update(self, step: int, **metrics: float | str) -> None:
        """Show that `step` is done, and metrics such as `loss=2.5`."""
        self._step = int(step)
        if self._display is not None:
            with _IGNORE_CLOSED:
                self._display.update(
                    self._step, ", ".join(f"{name} {_short(value)}" for name, value in metrics.items())
                )

    def advance(self) -> None:
        """Show that one more step is done."""
        self.update(self._step + 1)

    def close(self) -> None:
        """Show the last state; closing twice is allowed."""
        if self._display is not None:
            with _IGNORE_CLOSED:
                self._display.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bar:
    def __init__(self, total: int | None, initial: int, unit: str, description: str, stream: TextIO):
        bar_format = None if total is None else ("{desc}: " if description else "") + _BAR
        options = {"file": stream, "dynamic_ncols": True, "bar_format": bar_format}
        self._bar = tqdm(total=total, initial=initial, unit=unit, desc=description or None, **options)

    def update(self, step: int, metrics: str) -> None:
        self._bar.set_postfix_str(metrics, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.refresh()
        self._bar.close()


@contextlib.contextmanager
def copy_progress(size: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of copying `size` bytes, unless they are few.

    Yields:
      A function that is called, from any thread, with the number of bytes that have been copied since the last call.
    """
    if size <= _WORTH_SHOWING:
        yield lambda count: None
        return
    done, lock = 0, threading.Lock()
    with Progress(-(-size // 10**6), unit="MB", description="copy") as progress:

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress.update(-(-done // 10**6))

        yield advance


@dataclasses.dataclass
class _Lines:
    total: int | None
    initial: int
    head: str
    stream: TextIO
    interval: float
    now: Callable[[], float]
    printed_at: float | None = None
    pending: tuple[int, str] | None = None

    def __post_init__(self):
        self.started_at = self.now()

    def update(self, step: int, metrics: str) -> None:
        self.pending = (step, metrics)
        if self.printed_at is None or self.now() - self.printed_at >= self.interval:
            self.close()

    def close(self) -> None:
        """Print the pending line."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        line = f"{self.head} {step}" if self.total is None else f"{self.head} {step}/{self.total}"
        done = step - self.initial
        if metrics:
            line += f", {metrics}"
        if self.printed_at is not None and self.total is not None and done > 0 and step < self.total:
            left = (self.now() - self.started_at) / done * (self.total - step)
            line += f", {tqdm.format_interval(left)} left"
        print(line, file=self.stream, flush=True)
        self.printed_at = self.now()


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
