"""Stop a run when Google's cloud announces that it will take the machine back.

Compute Engine sets `preempted` in the machine's metadata about 30 seconds before it stops a spot VM; SIGTERM comes
later, when the system shuts down, or not at all inside a container.
"""

import contextlib
import logging
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator

from t5x.verbs.interrupts import signal_main_thread

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
