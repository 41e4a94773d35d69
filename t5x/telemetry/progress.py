"""Progress of a long run: a bar on a terminal, occasional lines in a log file."""

import contextlib
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
        self._total, self._initial, self._step = total, initial, initial
        self._stream = sys.stderr if stream is None else stream
        self._prefix = f"{description}: {unit}" if description else unit
        self._interval, self._now, self._disabled = seconds_between_lines, now, disable
        self._started = now()
        self._printed: float | None = None
        self._pending: str | None = None  # metrics that are not printed yet
        self._bar: tqdm | None = None
        if not disable and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = tqdm(
                total=total, initial=initial, unit=unit, desc=description or None, file=self._stream,
                dynamic_ncols=True, bar_format=None if total is None else ("{desc}: " if description else "") + _BAR,
            )  # fmt: skip

    def update(self, step: int, **metrics: float | str) -> None:
        """Show that `step` is done, and metrics such as `loss=2.5`."""
        self._step = int(step)
        if self._disabled:
            return
        self._pending = ", ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        with _IGNORE_CLOSED:
            if self._bar is not None:
                self._bar.set_postfix_str(self._pending, refresh=False)
                self._bar.update(self._step - self._bar.n)
            elif self._printed is None or self._now() - self._printed >= self._interval:
                self._print_line()

    def advance(self) -> None:
        """Show that one more step is done."""
        self.update(self._step + 1)

    def close(self) -> None:
        """Show the last state; closing twice is allowed."""
        with _IGNORE_CLOSED:
            if self._bar is not None:
                self._bar.refresh()
                self._bar.close()
            elif self._pending is not None:
                self._print_line()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print_line(self) -> None:
        line = f"{self._prefix} {self._step}" + ("" if self._total is None else f"/{self._total}")
        if self._pending:
            line += f", {self._pending}"
        done = self._step - self._initial
        if self._printed is not None and self._total is not None and done > 0 and self._step < self._total:
            seconds_left = (self._now() - self._started) / done * (self._total - self._step)
            line += f", {tqdm.format_interval(seconds_left)} left"
        print(line, file=self._stream, flush=True)
        self._printed, self._pending = self._now(), None


@contextlib.contextmanager
def copy_progress(size: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of copying `size` bytes, unless they are few.

    Yields:
      A function that is called, from any thread, with the number of bytes that have been copied since the last call.
    """
    done, lock = 0, threading.Lock()
    with Progress(-(-size // 10**6), unit="MB", description="copy", disable=size <= _WORTH_SHOWING) as progress:

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress.update(-(-done // 10**6))

        yield advance


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
