"""A server with a tiny model, in a process of its own, as a user starts it."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.support.programs import environment, free_port, start_python

TOKEN = "a-token-of-the-tests-0123456789"
OPTIONS = [
    "--labels=a,b", "--template={query} {document}", "--max_input_length=64", "--max_length=64", "--batch_size=4",
    "--max_queue=40", "--max_documents=50", "--max_body_mb=0.2", "--body_timeout=1", "--reload_period=0",
]  # fmt: skip


class Server:
    """A running server.

    Attributes:
      url: its address.
      process: its process.
      log: the file of its output.
    """

    def __init__(self, url: str, process: subprocess.Popen, log: Path):
        self.url = url
        self.process = process
        self.log = log

    def client(self, **options) -> httpx.Client:
        headers = {"Authorization": f"Bearer {TOKEN}"} | options.pop("headers", {})
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def post(self, path: str, **fields) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=fields)

    def assert_well(self) -> None:
        """Asserts that it still answers, and has logged no failure."""
        assert self.process.poll() is None, self.log.read_text()
        assert self.post("/v1/completions", prompt="abc", max_tokens=4).status_code == 200
        assert "Traceback" not in self.log.read_text()


@contextlib.contextmanager
def serving(model: Path, directory: Path, *options: str) -> Iterator[Server]:
    """Starts a server and waits until it is ready; in the end it is killed, if it still runs."""
    port, log = free_port(), directory / "server.txt"
    command = ["-m", "t5x", "serve", str(model), f"--port={port}", *OPTIONS, *options]
    with open(log, "w") as file:
        process = start_python(*command, stdout=file, stderr=file, env=environment(T5X_SERVE_TOKEN=TOKEN))
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()


def wait_ready(server: Server) -> None:
    end = time.monotonic() + 180
    while True:
        assert server.process.poll() is None and time.monotonic() < end, server.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/ready").status_code == 200:
                return
        time.sleep(0.1)
