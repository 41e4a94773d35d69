"""What a person sees of a long run: a bar on a terminal, now and then a line in a log file."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

_BAR = "{percentage:3.0f}%|{bar}| {n}/{total}, {remaining} left{postfix}"

# A reader that went away (Ctrl-C ends the `tee` behind a pipe too) must not end the work that is shown to it.
_UNHEARD = contextlib.suppress(OSError, ValueError)


class Progress:
    """Shows how far a run is.

    On a terminal there is a bar with the step, the figures and the time left. Elsewhere (a file, a pipe, a batch
    scheduler's log) there are plain lines: the first and the last update, and between them one every
    `seconds_between_lines` at most.

        >>> with Progress(1000, description="train", stream=sys.stdout) as progress:
        ...     progress.update(1, loss=5.52, **{"tokens/s": 34000})
        train: step 1/1000, loss 5.52, tokens/s 34,000

    Args:
      total: the step at which it ends, or None where that is not known.
      initial: the step it starts from.
      unit: what is counted.
      description: of the work, in a word or two.
      stream: where to show it; None is standard error.
      seconds_between_lines: for streams that are not a terminal.
      now: the time in seconds.
    """

    def __init__(
        self,
        total: int | None,
        initial: int = 0,
        unit: str = "step",
        description: str = "",
        stream: TextIO | None = None,
        *,
        seconds_between_lines: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._display = (
            _Bar(total, initial, unit, description, self._stream)
            if _is_terminal(self._stream)
            else _Lines(total, initial, unit, description, self._stream, seconds_between_lines, now)
        )

    def update(self, step: int, **figures: float | str) -> None:
        """Shows that `step` is done, and figures such as `loss=2.5`."""
        with _UNHEARD:
            self._display.update(int(step), ", ".join(f"{name} {_short(value)}" for name, value in figures.items()))

    def note(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        with _UNHEARD:
            self._display.note(text)

    def close(self) -> None:
        """Leaves the last state standing. A second time does nothing."""
        with _UNHEARD:
            self._display.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bar:
    def __init__(self, total: int | None, initial: int, unit: str, description: str, stream: TextIO):
        head = "{desc}: " if description else ""
        self._bar = tqdm(
            total=total,
            initial=initial,
            unit=unit,
            desc=description or None,
            file=stream,
            dynamic_ncols=True,
            bar_format=None if total is None else head + _BAR,
        )

    def update(self, step: int, figures: str) -> None:
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(step - self._bar.n)

    def note(self, text: str) -> None:
        self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        self._bar.refresh()
        self._bar.close()


class _Lines:
    def __init__(
        self,
        total: int | None,
        initial: int,
        unit: str,
        description: str,
        stream: TextIO,
        seconds_between_lines: float,
        now: Callable[[], float],
    ):
        self._total = total
        self._initial = initial
        self._head = f"{description}: {unit}" if description else unit
        self._stream = stream
        self._interval = seconds_between_lines
        self._now = now
        self._began = now()
        self._printed_at: float | None = None
        self._pending: tuple[int, str] | None = None

    def update(self, step: int, figures: str) -> None:
        self._pending = (step, figures)
        if self._printed_at is None or self._now() - self._printed_at >= self._interval:
            self._print_pending()

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._pending is not None:
            self._print_pending()

    def _print_pending(self) -> None:
        step, figures = self._pending
        self._pending = None
        parts = [f"{self._head} {step}" + (f"/{self._total}" if self._total is not None else "")]
        if figures:
            parts.append(figures)
        if self._printed_at is not None and (left := self._seconds_left(step)) is not None:
            parts.append(f"{tqdm.format_interval(left)} left")
        print(", ".join(parts), file=self._stream, flush=True)
        self._printed_at = self._now()

    def _seconds_left(self, step: int) -> float | None:
        done = step - self._initial
        if self._total is None or done <= 0 or step >= self._total:
            return None
        return (self._now() - self._began) / done * (self._total - step)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
