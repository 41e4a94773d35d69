"""Exit codes of signals, and handlers for Ctrl-C and SIGTERM that never raise during an import.

Training installs its own handlers, which save a checkpoint: `t5x.trainer.signals`.
"""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

# 75 is EX_TEMPFAIL: a scheduler may restart the run. SIGHUP: the terminal was closed.
EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 129}

Handler = Callable[[int, FrameType | None], None]
_MESSAGES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_RESEND_SECONDS = 0.02
_deferred: set[int] = set()  # signals that arrived during an import and are sent again
_resent: set[int] = set()  # of these, signals that are about to arrive again


class Terminated(SystemExit):
    """Raised on SIGTERM."""

    code: int


def print_now(text: str) -> None:
    """Write a message to standard error, also from a signal handler and past a progress bar.

    A closed pipe must not prevent what comes next: Ctrl-C also ends the `tee` of `2>&1 | tee log`.
    """
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())


def signal_main_thread(signum: int) -> None:
    """Send this process a signal. With `os.kill` another thread may receive it, and a waiting main thread sleeps on."""
    if (thread := threading.main_thread().ident) is not None:
        signal.pthread_kill(thread, signum)


def leave_at_once(signum: int, frame: FrameType | None) -> None:
    """Exit on Ctrl-C or SIGTERM. The handler until `work_begins`, when nothing needs to be cleaned up."""
    print_now(_MESSAGES[signum])
    os._exit(EXIT_CODES[signum])


def work_begins() -> None:
    """Let Ctrl-C and SIGTERM raise exceptions from here on, so that `finally` blocks run; collect garbage again."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, _outside_imports(signal.default_int_handler))
    signal.signal(signal.SIGTERM, _outside_imports(_terminate))
    if getattr(sys.unraisablehook, "func", None) is not _resend_dropped:
        sys.unraisablehook = functools.partial(_resend_dropped, sys.unraisablehook)


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C while modules are imported, in programs that have not called `work_begins`.

    Garbage is not collected either: the collector would look through all modules several times.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    previous, collects = signal.signal(signal.SIGINT, lambda *_: received.append(True)), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        signal.signal(signal.SIGINT, previous)
        if received:
            signal.raise_signal(signal.SIGINT)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    print_now(_MESSAGES[signal.SIGTERM])
    raise Terminated(EXIT_CODES[signal.SIGTERM])


def _outside_imports(handler: Handler) -> Handler:
    """Wrap a signal handler that raises, so that it does not raise while a module is imported.

    Extension modules run Python code when they are initialised, and abort on an exception or swallow it. The signal
    is sent again until the import has ended. A second signal meanwhile ends the process at once.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        is_second = signum in _deferred and signum not in _resent
        _resent.discard(signum)
        if not _is_importing(frame):
            _deferred.discard(signum)
            handler(signum, frame)
        elif is_second:
            os._exit(EXIT_CODES[signum])
        else:
            _deferred.add(signum)
            threading.Timer(_RESEND_SECONDS, _send_again, (signum,)).start()

    return handle


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    return frame is not None


def _send_again(signum: int) -> None:
    if signum in _deferred:
        _resent.add(signum)
        signal_main_thread(signum)


def _resend_dropped(previous_hook: Callable[[Any], object], dropped: Any) -> None:
    """Resend a signal whose exception Python dropped, as in destructors and garbage collection."""
    signum = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(dropped.exc_type)
    if signum is None:
        previous_hook(dropped)
    else:
        threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()
