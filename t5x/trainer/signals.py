"""Ctrl-C and SIGTERM: finish the step, save, and say with the exit code which it was."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

# 75 is EX_TEMPFAIL: a scheduler may start it again. SIGHUP: the terminal was closed.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 129}


class Stopped(Exception):
    """A run that was asked to stop, and did so in good order."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.exit_code = EXIT_CODES[signal.Signals(signum)]


class StopRequest:
    """Notes the first signal while it is entered, once there is something to save; a second SIGINT ends at once.

    Attributes:
      signum: the signal that came, or None.
      something_to_save: until this is set a signal ends the process at once, even in the middle of a compilation.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.something_to_save = False
        self._previous: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to its main thread only; a run in another thread is stopped by whoever started it.
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in EXIT_CODES}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.something_to_save:
            _say(f"{signal.Signals(signum).name}: stopped before the first step; there was nothing to save")
            os._exit(EXIT_CODES[signal.Signals(signum)])
        if self.signum is not None and signum == signal.SIGINT:
            _say("stopped at once; nothing was saved after the last checkpoint")
            os._exit(EXIT_CODES[signal.SIGINT])
        if self.signum is None:
            self.signum = signum
            _say(f"{signal.Signals(signum).name}: finishing this step and saving (Ctrl-C again: stop at once)")


def _say(text: str) -> None:
    """Straight to standard error; a reader that Ctrl-C took along (`2>&1 | tee log`) must not keep us from saving."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
