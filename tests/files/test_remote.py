"""Files of an HTTP server: what it answers is reported, and a server that answers nothing is given up."""

import http.server
import threading

import pytest

from t5x._runtime.errors import UserError
from t5x.data import HuggingFaceDataSource, JsonLinesDataSource
from t5x.files import remote, user_files

pytest.importorskip("aiohttp")
pytest.importorskip("requests")

CONTENT = b'{"inputs": "a", "targets": "b"}\n' * 3


@pytest.fixture
def server():
    """The address of a server. It answers /CODE/… with that code, never answers /silent, and stops inside /stalled."""
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.split("/")[1]
            if name == "silent":
                released.wait()
                return
            self.send_response(int(name) if name.isdigit() else 200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(CONTENT[:5] if name == "stalled" else CONTENT)
            if self.command == "GET" and name == "stalled":
                self.wfile.flush()
                released.wait()

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    released.set()
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())


def read(url):
    return JsonLinesDataSource({"train": url}).num_examples("train")


def test_a_file_is_read(server):
    assert read(f"{server}/file.jsonl") == 3


@pytest.mark.parametrize(
    "path, message",
    [
        ("500/file.jsonl", r"the server answered 500 \(Internal Server Error\)"),
        ("503/file.jsonl", r"the server answered 503 \(Service Unavailable\)"),
        ("404/file.jsonl", "there is no such file"),
        ("403/file.jsonl", "access is denied"),
        ("silent/file.jsonl", r"the server has sent nothing for 0\.5 s.*T5X_REMOTE_TIMEOUT"),
        ("stalled/file.jsonl", r"the server has sent nothing for 0\.5 s.*T5X_REMOTE_TIMEOUT"),
    ],
)
def test_the_response_of_the_server_is_reported(path, message, server, monkeypatch):
    if "T5X_REMOTE_TIMEOUT" in message:
        monkeypatch.setenv("T5X_REMOTE_TIMEOUT", "0.5")
    with pytest.raises(UserError, match=f"^{server}/{path}: {message}"):
        read(f"{server}/{path}")


@pytest.mark.parametrize("path", ["500", "silent"])
def test_a_checkpoint_of_a_broken_server_is_not_called_missing(path, server, run_here, monkeypatch):
    monkeypatch.setenv("T5X_REMOTE_TIMEOUT", "0.5" if path == "silent" else "60")
    run_here("inspect", f"{server}/{path}/checkpoint_7").refused("the server")


def test_a_broken_server_is_not_an_empty_one(server):
    assert not user_files.exists(f"{server}/404/file.json")
    with pytest.raises(UserError, match="the server answered 500"):
        HuggingFaceDataSource(f"{server}/500")


def test_an_invalid_time_limit(server, monkeypatch):
    monkeypatch.setenv("T5X_REMOTE_TIMEOUT", "soon")
    with pytest.raises(UserError, match="T5X_REMOTE_TIMEOUT is 'soon'"):
        read(f"{server}/file.jsonl")
