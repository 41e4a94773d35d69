"""Leases on a file system with conditional writes (TensorStore's) and on one without them (fsspec's)."""

import json
import logging
import threading
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5x._runtime.errors import UserError
from t5x.files import lease, remote
from t5x.files.lease import Lease
from t5x.files.remote import RemotePath

OTHER = {"pid": 1, "host": "other", "since": "2026-01-01", "machine": "other"}


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("t5x"), "propagate", True)
    caplog.set_level(logging.INFO, "t5x")
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    for name, seconds in {"_TERM": 0.3, "_PERIOD": 0.02, "_POLL": 0.05}.items():
        monkeypatch.setattr(lease, name, seconds)


@pytest.fixture(params=["conditional", "unconditional"])
def url(request, tmp_path, monkeypatch):
    if request.param == "conditional":
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        yield f"file://{tmp_path}/run/.lease"
    else:
        yield f"memory://{tmp_path.name}/run/.lease"
        fsspec.filesystem("memory").store.clear()


def test_renewed_lease_is_refused_to_others_and_free_after_its_release(url, monkeypatch):
    monkeypatch.setattr(lease, "_TERM", 5.0)
    with Lease.acquire(url, "run") as held:
        with pytest.raises(UserError, match=f"in use by process {held.holder['pid']}"):
            Lease.acquire(url, "run")
        held.check()
    assert lease.read_holder(url) is None
    Lease.acquire(url, "run").release()


def test_renewal_continues_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_TERM", 5.0)
    url, original, has_failed = f"memory://{tmp_path.name}/run/.lease", MemoryFileSystem.pipe_file, threading.Event()

    def pipe_file(self, path, value, **options):
        if not has_failed.is_set():
            has_failed.set()
            raise PermissionError("not now")
        return original(self, path, value, **options)

    with Lease.acquire(url, "run") as held:
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        assert has_failed.wait(30)
        with pytest.raises(UserError, match="in use"):
            Lease.acquire(url, "run")
        held.check()


@pytest.mark.parametrize(
    ("holder", "watched"),
    [
        ({"renewed": lambda now: now}, True),
        ({"renewed": lambda now: now + 1e6}, True),  # its clock is ahead
        ({"renewed": lambda now: now - lease._CERTAIN - 60}, False),
        ({"renewed": lambda now: "yesterday"}, False),
        ({"renewed": lambda now: now, "machine": lease._machine(), "started": "0"}, False),  # its number was reused
    ],
    ids=["just renewed", "clock ahead", "renewed long ago", "unreadable time", "ended here"],
)
def test_lease_of_a_silent_holder_is_watched_for_its_term_unless_the_holder_is_dead(url, caplog, holder, watched):
    content = OTHER | holder | {"renewed": holder["renewed"](time.time())}
    RemotePath.parse(url).write_bytes(json.dumps(content).encode())
    with Lease.acquire(url, "run") as held:
        held.check()
        assert ("waiting up to" in caplog.text) == watched
        assert "run was in use by process 1 on other since 2026-01-01, which ended" in caplog.text


@pytest.mark.parametrize("content", [b"", b"not JSON", b"[1]"])
def test_file_that_names_no_holder_is_a_free_lease(url, content):
    RemotePath.parse(url).write_bytes(content)
    with Lease.acquire(url, "run") as held:
        assert lease.read_holder(url)["pid"] == held.holder["pid"]
