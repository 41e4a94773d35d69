"""An HTTP proxy in front of a storage server: adds latency, injects faults, and completes the GCS emulator.

The emulator ignores `ifGenerationMatch` and sends no `x-goog-generation`; leases and commits of TensorStore need both.
The proxy looks up the object's generation first, one request for an object at a time, as GCS does it.
"""

import collections
import contextlib
import http.client
import http.server
import json
import random
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping

FAULTS = ("drop", "lost response", "delay", "429", "503", "truncated", "reset")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "proxy-connection", "expect"}


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards requests to `upstream`.

    Attributes:
      rate: share of the requests that get a fault: at 0.1, every tenth.
      faults: kinds of faults, sampled uniformly: some of FAULTS, or HTTP status codes.
      latency: seconds added to every request.
      injected: how often each fault occurred.
      requests: number of requests per method.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, upstream: str, *, completes_gcs: bool = False, seed: int = 0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urllib.parse.urlsplit(upstream).netloc
        self.completes_gcs = completes_gcs
        self.rate = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.latency = 0.0
        self.injected: collections.Counter[str] = collections.Counter()
        self.requests: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)
        self._due = 0.0  # faults that are to be injected
        self._lock = threading.Lock()
        self._object_locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.netloc}"

    def sample_fault(self, method: str) -> str | None:
        with self._lock:
            self.requests[method] += 1
            self._due += self.rate
            if self._due < 1:
                return None
            self._due -= 1
            fault = self._random.choice(self.faults)
            self.injected[fault] += 1
            return fault

    def object_lock(self, name: str) -> threading.Lock:
        with self._lock:
            return self._object_locks[name]

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that close their connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_request(self) -> None:
        body = self._read_body()
        time.sleep(self.server.latency)
        fault = self.server.sample_fault(self.command)
        if fault == "drop":
            self.close_connection = True
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif fault is not None and fault.isdigit():
            self._reply(int(fault), {}, b"injected")
        else:
            if fault == "delay":
                time.sleep(1.5)
            status, headers, content = self._forward(body)
            if fault == "lost response":
                self.close_connection = True
            else:
                self._reply(status, headers, content, truncated=fault == "truncated")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_request

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forward(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        expected = query.get("ifGenerationMatch")
        download = query.get("alt") == "media"
        if not self.server.completes_gcs or (expected is None and not download):
            return self._ask(self.command, self.path, body)
        name = self._object_path(query, body)
        with self.server.object_lock(name):
            status, _, content = self._ask("GET", name, b"", headers={})
            generation = str(json.loads(content)["generation"]) if status == 200 else "0"
            if expected not in (None, generation):
                error = {"error": {"code": 412, "message": "conditionNotMet"}}
                return 412, {"Content-Type": "application/json"}, json.dumps(error).encode()
            status, headers, content = self._ask(self.command, self.path, body)
            return status, {**headers, "x-goog-generation": generation} if download else headers, content

    def _object_path(self, query: Mapping[str, str], body: bytes) -> str:
        """Return the path of the object's metadata."""
        path = urllib.parse.urlsplit(self.path).path
        if not path.startswith("/upload/"):
            return path.removeprefix("/download")
        name = query.get("name") or json.loads(re.search(rb"{[^}]*}", body)[0])["name"]
        return path.removeprefix("/upload") + "/" + urllib.parse.quote(name, safe="")

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        if headers is None:  # the Host that the client signed is kept
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        with contextlib.closing(http.client.HTTPConnection(self.server.upstream, timeout=60)) as connection:
            connection.request(method, path, body or None, dict(headers))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def _reply(self, status: int, headers: Mapping[str, str], content: bytes, *, truncated: bool = False) -> None:
        self.send_response_only(status)
        lengths = {name: value for name, value in headers.items() if name.lower() == "content-length"}
        for name, value in headers.items():
            if name.lower() not in _HOP_BY_HOP | {"content-length"}:  # Location: of a resumable upload
                self.send_header(name, value.replace(self.server.upstream, self.server.netloc))
        has_body = self.command != "HEAD" and status not in (204, 304)
        length = str(len(content)) if has_body else next(iter(lengths.values()), "0")
        self.send_header("Content-Length", length)
        self.end_headers()
        if has_body:
            self.wfile.write(content[: len(content) // 2] if truncated else content)
        if truncated:
            self.close_connection = True

    def log_message(self, format: str, *args) -> None:
        """Log nothing."""


@contextlib.contextmanager
def running(upstream: str, *, completes_gcs: bool = False, seed: int = 0) -> Iterator[Proxy]:
    """Run a proxy in a thread."""
    with Proxy(upstream, completes_gcs=completes_gcs, seed=seed) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
