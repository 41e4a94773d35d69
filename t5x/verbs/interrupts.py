"""Ctrl-C and SIGTERM in the verbs: exceptions that let `finally` blocks run, but never during an import.

Training runs handle signals themselves: `t5x.trainer.signals`. Exit codes are set in `t5x.cli`.
"""

import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn


class Terminated(SystemExit):
    """Raised on SIGTERM."""

    code: int


Handler = Callable[[int, FrameType | None], None]
_RESEND_SECONDS = 0.02
_deferred: set[int] = set()  # signals that came during an import and are sent again
_resent: set[int] = set()  # of these, signals that are about to arrive again


def _outside_imports(handler: Handler) -> Handler:
    """Wrap a signal handler that raises, so that it does not raise while a module is imported.

    Extension modules run Python code when they are initialised, and abort or swallow what is raised there. The signal
    is sent again until the import has ended. A second signal meanwhile ends the process at once.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        is_second = signum in _deferred and signum not in _resent
        _resent.discard(signum)
        if not _is_importing(frame):
            _deferred.discard(signum)
            handler(signum, frame)
        elif is_second:
            os._exit(130 if signum == signal.SIGINT else 75)
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
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signum)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    print("terminated", file=sys.stderr, flush=True)
    raise Terminated(75)


def work_begins() -> None:
    """Let Ctrl-C and SIGTERM raise exceptions from here on, so that `finally` blocks run; collect garbage again."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, _outside_imports(signal.default_int_handler))
    signal.signal(signal.SIGTERM, _outside_imports(_terminate))
    if getattr(sys.unraisablehook, "func", None) is not _comes_again:
        sys.unraisablehook = functools.partial(_comes_again, sys.unraisablehook)


def _comes_again(otherwise: Callable[[Any], object], dropped: Any) -> None:
    """Resend a signal whose exception Python dropped, as in destructors and garbage collection."""
    signum = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(dropped.exc_type)
    if signum is None:
        otherwise(dropped)
    else:
        threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()
