"""Storage servers that speak the real protocols: moto for S3, gcp-storage-emulator for GCS, each behind a proxy."""

import contextlib
import dataclasses
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.object_stores.proxy import Proxy, running
from tests.support.programs import free_port

BUCKET = "bucket"


@dataclasses.dataclass(frozen=True)
class Store:
    """A running server.

    Attributes:
      url: of its bucket, such as `s3://bucket`.
      environment: variables with which clients find the server.
      proxy: what clients talk to.
    """

    url: str
    environment: Mapping[str, str]
    proxy: Proxy


@contextlib.contextmanager
def s3(directory: Path) -> Iterator[Store]:
    """Run an S3 server with an empty bucket; its log is in `directory`."""
    with _program(directory, "moto.server", "-p", "{port}") as address, running(address) as proxy:
        environment = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        _request("PUT", f"{address}/{BUCKET}")
        yield Store(f"s3://{BUCKET}", environment, proxy)


@contextlib.contextmanager
def gcs(directory: Path) -> Iterator[Store]:
    """Run a GCS server with an empty bucket; its log is in `directory`."""
    arguments = ("start", "--host", "127.0.0.1", "--port", "{port}", "--in-memory", f"--default-bucket={BUCKET}")
    server = _program(directory, "gcp_storage_emulator", *arguments)
    with server as address, running(address, completes_gcs=True) as proxy:
        yield Store(f"gs://{BUCKET}", {"STORAGE_EMULATOR_HOST": proxy.url}, proxy)


@contextlib.contextmanager
def _program(directory: Path, module: str, *arguments: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", module, *(argument.format(port=port) for argument in arguments)]
    log = directory / f"{module}.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(OSError):
                    _request("GET", address)
                    break
                time.sleep(0.1)
            yield address
        finally:
            process.kill()


def _request(method: str, url: str) -> None:
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).close()
