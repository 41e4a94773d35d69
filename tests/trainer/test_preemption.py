"""A notice of preemption by a metadata server that answers like Google's stops a run."""

import http.server
import signal
import threading
import time

import pytest

from t5x.trainer.signals import watch_for_preemption


class Metadata(http.server.ThreadingHTTPServer):
    """A metadata server: `wait_for_change` holds the answer back until the value has changed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.preempted = threading.Event()
        self.failures = 1


class Handler(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google" or "/instance/preempted" not in self.path:
            return self.send_error(403)
        if self.server.failures:
            self.server.failures -= 1
            return self.send_error(503)
        if "wait_for_change=true" in self.path:
            self.server.preempted.wait(20)
        content = b"TRUE" if self.server.preempted.is_set() else b"FALSE"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr("t5x.trainer.signals._METADATA_RETRY_SECONDS", 0.05)
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()


@pytest.fixture
def received():
    """An event that SIGTERM sets."""
    event = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGTERM, before)


def test_a_notice_becomes_a_signal(metadata, received, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there, and it must not be asked
    with watch_for_preemption():
        time.sleep(0.3)
        assert not received.is_set()
        metadata.preempted.set()
        # In short pieces: Python does not run a handler during a wait that begins just after its signal came.
        assert any(received.wait(0.05) for _ in range(200))
    assert metadata.failures == 0


def test_a_run_that_has_ended_gets_no_signal(metadata, received):
    with watch_for_preemption():
        time.sleep(0.2)
    metadata.preempted.set()
    assert not received.wait(0.5)
