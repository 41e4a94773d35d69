"""Real storage servers for the tests in this directory, which are skipped without the packages of `.[stores]`."""

import importlib.util

import fsspec
import pytest

from t5x.files import remote
from tests.object_stores import servers

_PACKAGES = ("moto", "gcp_storage_emulator", "s3fs", "gcsfs")

if not all(importlib.util.find_spec(package) for package in _PACKAGES):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package", params=[servers.s3, servers.gcs], ids=["s3", "gcs"])
def server(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", (0.1, 0.2, 0.4))
    yield server
    server.proxy.rate, server.proxy.latency = 0.0, 0.0
    fsspec.get_filesystem_class(server.url.split(":")[0]).clear_instance_cache()
