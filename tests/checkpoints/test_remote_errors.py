"""Errors of fsspec's drivers become one message that names the path and what to do."""

import errno
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from t5x._runtime.errors import UserError
from t5x.checkpoints import remote_reading
from t5x.files import remote
from t5x.files.storage_errors import explained


@pytest.fixture(autouse=True)
def no_delays(tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())


class NoCredentialsError(Exception):  # as botocore names it
    pass


class EndpointConnectionError(Exception):
    pass


class HttpError(Exception):  # as gcsfs has it
    def __init__(self, message, code=403):
        super().__init__(message)
        self.code = code


def caused_by(error):
    """What the driver of HTTP raises for every failure."""
    missing = FileNotFoundError("http://server/file")
    missing.__cause__ = error
    return missing


FAULTS = {
    "no credentials": (NoCredentialsError("Unable to locate credentials"), "access is denied .*Unable to locate"),
    "denied": (PermissionError("Access Denied"), "access is denied"),
    "denied by a code": (HttpError("no"), "access is denied"),
    "denied in words": (OSError("Forbidden: https://storage"), "access is denied"),
    "no bucket": (FileNotFoundError("The specified bucket does not exist"), "There is no checkpoint"),
    "no file, by a code": (caused_by(HttpError("Not Found", 404)), "There is no checkpoint"),
    "no file, in words": (caused_by(OSError("NoSuchKey")), "There is no checkpoint"),
    "a broken server": (HttpError("Oops", 500), r"the server answered 500 \(HttpError: Oops\)"),
    "a broken server behind it": (caused_by(HttpError("Oops", 503)), "the server answered 503"),
    "too many requests": (caused_by(HttpError("Slow down", 429)), "the server answered 429"),
    "denied behind it": (caused_by(HttpError("no")), "access is denied"),
    "no answer behind it": (caused_by(TimeoutError()), "cannot be reached"),
    "no network": (EndpointConnectionError("Could not connect"), "cannot be reached"),
    "no answer": (TimeoutError(), r"cannot be reached \(TimeoutError\)"),
    "anything else": (OSError(errno.EIO, "odd"), "cannot be accessed .*odd"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_of_drivers_raise_user_error(fault, monkeypatch):
    error, message = FAULTS[fault]

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    monkeypatch.setattr(MemoryFileSystem, "ls", fail)
    with pytest.raises(UserError, match=message) as raised:
        remote_reading.stage("memory://bucket/run")
    assert "bucket/run" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_sign_in_hints_and_missing_drivers(monkeypatch):
    hint = r"gs://b/x: access is denied.*gcloud auth application-default login"
    with pytest.raises(UserError, match=hint), explained("gs://b/x"):
        raise PermissionError("no")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for name in ("gs", "gcs"):  # even if the driver is loaded already
        monkeypatch.delitem(_registry, name, raising=False)
    with pytest.raises(UserError, match=r"^gs://x/y: gs:// needs the package gcsfs.*`pip install gcsfs`.*'\.\[gcs\]'"):
        remote_reading.stage("gs://x/y")
    with pytest.raises(UserError, match=r"nosuch:// .*gs://"):
        remote_reading.stage("nosuch://x/y")
