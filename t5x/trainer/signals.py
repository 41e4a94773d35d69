"""Orderly stops after Ctrl-C, a closed terminal, or SIGTERM, which schedulers and preempted machines send.

JAX's preemption service also handles SIGTERM in several processes; this one handles Ctrl-C as well.
"""

import contextlib
import itertools
import logging
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from types import FrameType, TracebackType
from typing import Any

import jax

from t5x._runtime.signals import EXIT_CODES, print_now, signal_main_thread
from t5x.partitioning import distributed

_POLL_SECONDS = 0.5
_numbers = itertools.count()


class Stopped(Exception):
    """Raised after a run was asked to stop and did so in an orderly way."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.exit_code = EXIT_CODES[signum]


PreemptionError = Stopped  # T5X's name


class Interrupted(Exception):
    """Raised between two batches of an evaluation if the run is to stop."""


class StopRequest:
    """Context manager that records the first signal, once there is something to save. A second SIGINT exits at once.

    Several processes stop at the same point, after a step or a batch of an evaluation, no matter which of them got the
    signal. That process notifies the others. Each publishes how many steps and batches it has started, and starts no
    more until all have published; they then continue to the largest of these numbers and stop. No process waits for
    another while it still has to run one of these steps, so that their collectives complete.

    Attributes:
      signum: the signal that was received, or None.
      something_to_save: until this is set, a signal exits at once, even during a compilation.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.something_to_save = False
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._common = _CommonStop() if jax.process_count() > 1 else None

    def __bool__(self) -> bool:
        """Return whether the run is to stop. All processes return the same at the same point."""
        return self.signum is not None if self._common is None else self._common.reached

    def here(self) -> bool:
        """Return whether to stop here. All processes call it before every step and every batch of an evaluation."""
        if self._common is not None and self._common.stops_here():
            self.signum = self._common.signum
        return bool(self)

    def check(self) -> None:
        """Raise Interrupted if the run is to stop here."""
        if self.here():
            raise Interrupted

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to the main thread only; a run in another thread is stopped by its caller.
        if threading.current_thread() is threading.main_thread():
            # Ignored signals stay ignored: a run under `nohup` must survive the end of its terminal.
            handled = [signum for signum in EXIT_CODES if signal.getsignal(signum) is not signal.SIG_IGN]
            self._previous = {signum: signal.signal(signum, self._handle) for signum in handled}
        if self._common is not None:
            self._common.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._common is not None:
            self._common.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.something_to_save:
            print_now(f"{signal.Signals(signum).name}: stopped before the first step; there was nothing to save")
            os._exit(EXIT_CODES[signum])
        if self.signum is not None and signum == signal.SIGINT:
            print_now("stopped at once; nothing was saved after the last checkpoint")
            os._exit(EXIT_CODES[signal.SIGINT])
        if self.signum is None:
            self.signum = signum
            print_now(f"{signal.Signals(signum).name}: finishing this step and saving (Ctrl-C again: stop at once)")
            if self._common is not None:
                self._common.signum = signum


class _CommonStop:
    """Finds the point at which several processes stop; they count the steps and batches that they start.

    Attributes:
      signum: set by the signal handler to request a stop; later, the signal that one of the processes received.
      reached: whether the point has been reached.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.reached = False
        self._started = 0  # steps and batches that this process has started
        self._published = False
        self._last: futures.Future[int] = futures.Future()
        self._key = f"stop {next(_numbers)}"
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="t5x-stop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def stops_here(self) -> bool:
        with self._lock:
            if not self._published:
                self._started += 1
                return False
        self.reached = self._started >= self._last.result()
        self._started += not self.reached
        return self.reached

    def _watch(self) -> None:
        try:
            while (requested := distributed.poll(self._key)) is None:
                if self._closed.wait(_POLL_SECONDS):
                    return
                if self.signum is not None:
                    distributed.put(self._key, int(self.signum))
            with self._lock:
                self._published, started = True, self._started
            last = max(distributed.exchange("last begun", started))
            self.signum = requested
            self._last.set_result(last)
        except Exception as error:
            with self._lock:
                self._published = True
            self._last.set_exception(error)


log = logging.getLogger(__name__)

_METADATA_HOST = "metadata.google.internal"
_PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=60"
_METADATA_RETRY_SECONDS = 5.0


@contextlib.contextmanager
def watch_for_preemption() -> Iterator[None]:
    """During the block, a notice of preemption sends SIGTERM to this process. Does nothing outside Compute Engine.

    GCE_METADATA_HOST, as in Google's own libraries, names another metadata server.
    """
    closed = threading.Event()
    if host := _metadata_host():
        threading.Thread(target=_await_notice, args=(host, closed), name="t5x-preemption", daemon=True).start()
    try:
        yield
    finally:
        closed.set()


def _await_notice(host: str, closed: threading.Event) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has other metadata
    path = _PREEMPTED_PATH.replace("wait_for_change=true", "wait_for_change=false")  # the first answer comes at once
    while not closed.is_set():
        request = urllib.request.Request(f"http://{host}{path}", headers={"Metadata-Flavor": "Google"})
        try:
            with opener.open(request, timeout=90) as response:
                preempted = response.read(100).strip() == b"TRUE"
        except (OSError, ValueError) as error:
            log.debug("the metadata server %s did not answer: %s", host, error)
            closed.wait(_METADATA_RETRY_SECONDS)
            continue
        path = _PREEMPTED_PATH
        if preempted and not closed.is_set():
            log.warning("this machine is being preempted")
            signal_main_thread(signal.SIGTERM)
            return


def _metadata_host() -> str | None:
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            return _METADATA_HOST if "Google Compute Engine" in file.read() else None
    except OSError:
        return None
