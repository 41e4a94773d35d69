"""A lease on a remote directory: the right of one program to write there, where the kernel's locks do not reach.

A lease is a small file that names its holder and that the holder renews. Every write requires that the file is still
the one last seen, so of two programs only one succeeds. A lease that nobody renews for a minute is free. Clocks of
machines differ, so the program that wants it watches it for that time itself, unless the holder is known to be dead: a
process of this machine, or a lease that is many minutes old.
"""

import contextlib
import datetime
import json
import logging
import os
import posixpath
import secrets
import socket
import threading
import time
from typing import Any

import tensorstore as ts

from t5x._runtime.errors import UserError
from t5x.files.remote import RemotePath, has_tensorstore_driver, tensorstore_spec
from t5x.files.storage_errors import explained

log = logging.getLogger(__name__)

_TERM = 60.0  # seconds without renewal after which a lease is free
_PERIOD = 10.0  # seconds between renewals
_CERTAIN = 600.0  # seconds on different clocks after which it is free without watching it
_POLL = 1.0
_RETRIES = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "4s"}


class Lease(contextlib.AbstractContextManager):
    """A lease that this process holds, renewed in the background until `release`.

    with Lease.acquire("gs://bucket/run/.lease", "MODEL_DIR gs://bucket/run") as lease:
        ...
        lease.check()  # before a write that must not be repeated by another program

    Attributes:
      holder: the description of this process in the file.
    """

    def __init__(self, file: "_LeaseFile", what: str, holder: dict[str, Any], generation: bytes):
        self._file, self._what, self.holder, self._generation = file, what, holder, generation
        self._renewed = time.monotonic()
        self._lost: str | None = None
        self._writing, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="t5x-lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, url: str, what: str) -> "Lease":
        """Take the lease, waiting up to a minute if its holder may be dead.

        Args:
          url: the file of the lease.
          what: what it protects, for messages.

        Raises:
          UserError: another program holds it; the message names it.
        """
        file, holder, watched = _open(url), _describe_this_process(), None
        begin = time.monotonic()
        while True:
            content, generation = file.read()
            user = _parse(content)
            if user is None or _is_dead(user) or time.monotonic() - begin > _TERM:
                if user is not None:
                    log.warning("%s was in use by %s, which ended without releasing it", what, describe(user))
                if (written := file.write(_content(holder), generation)) is not None:
                    return cls(file, what, holder, written)
                begin = time.monotonic()
            elif watched is None:
                log.info("%s is in use by %s; waiting up to %d s to see if it still runs", what, describe(user), _TERM)
            elif watched != generation:
                raise UserError(
                    f"{what} is in use by {describe(user)}. Stop that program, or choose another directory for this."
                )
            watched = generation
            time.sleep(_POLL)

    def check(self) -> None:
        """Raise a UserError unless the lease is still held; renew it if it was not renewed for long."""
        if time.monotonic() - self._renewed > _TERM / 2:
            self._renew()
        if self._lost is not None:
            raise UserError(self._lost)

    def release(self) -> None:
        """Give the lease back. May be called twice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        if self._lost is None:
            try:
                self._file.write(None, self._generation)
            except UserError as error:
                log.warning("the lease could not be released, so the next program waits for its end: %s", error)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._stopped.wait(_PERIOD) and self._lost is None:
            try:
                self._renew()
            except UserError as error:
                log.warning("the lease could not be renewed; trying again in %d s: %s", _PERIOD, error)

    def _renew(self) -> None:
        with self._writing:
            written = self._file.write(_content(self.holder), self._generation)
            if written is not None:
                self._generation, self._renewed = written, time.monotonic()
                return
            new_holder = _parse(self._file.read()[0])
        now = "its lease was removed" if new_holder is None else f"it was taken by {describe(new_holder)}"
        self._lost = (
            f"{self._what} can no longer be written: {now}, because this program could not renew its lease for "
            f"{time.monotonic() - self._renewed:.0f} s. Nothing more is written. Stop the other program, then restart."
        )
        log.error("%s", self._lost)


def read_holder(url: str) -> dict[str, Any] | None:
    """Return the description of the process that holds a lease; None if nobody does."""
    return _parse(_open(url).read()[0])


def describe(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


# --- The file


class _LeaseFile:
    """A file that is written only if it has not changed, through TensorStore."""

    def __init__(self, url: str):
        self._url = url
        directory, self._name = url.rsplit("/", 1)
        context = ts.Context({"gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES})
        with explained(url):
            self._store = ts.KvStore.open(tensorstore_spec(directory), context=context).result()

    def read(self) -> tuple[bytes, bytes]:
        """Return (content, generation); the content of a missing file is empty."""
        with explained(self._url):
            result = self._store.read(self._name).result()
        return result.value, result.stamp.generation

    def write(self, content: bytes | None, generation: bytes) -> bytes | None:
        """Write, or remove if None, the file of that generation. Return the new generation, None if it has changed."""
        with explained(self._url):
            if written := self._store.write(self._name, content, if_equal=generation).result().generation:
                return written
        now, current = self.read()  # the request may have succeeded and only its answer got lost
        if now == (content or b""):
            return current
        if current == generation:  # what S3 makes of a bucket that does not exist
            raise UserError(
                f"{self._url} cannot be written. Check that the bucket exists and that you may write there."
            )
        return None


class _UncheckedFile(_LeaseFile):
    """The same for file systems without conditional writes: two programs that start at the same moment may collide."""

    def __init__(self, url: str):
        self._file = RemotePath.parse(url)

    def read(self) -> tuple[bytes, bytes]:
        self._file.fs.invalidate_cache()
        content = self._file.read_bytes_if_exists() or b""
        return content, content

    def write(self, content: bytes | None, generation: bytes) -> bytes | None:
        if self.read()[1] != generation:
            return None
        if content is None:
            self._file.remove()
        else:
            fs, path = self._file.fs, self._file.path
            with explained(self._file.url):
                try:
                    fs.pipe_file(path, content)
                except FileNotFoundError:  # there are real directories, and its own is missing
                    fs.makedirs(posixpath.dirname(path), exist_ok=True)
                    fs.pipe_file(path, content)
        return content or b""


def _open(url: str) -> _LeaseFile:
    return _LeaseFile(url) if has_tensorstore_driver(url) else _UncheckedFile(url)


def _content(holder: dict[str, Any]) -> bytes:
    """Return the file's content. It is never the same twice: S3 compares contents."""
    return json.dumps(holder | {"renewed": time.time(), "token": secrets.token_hex(8)}).encode()


def _parse(content: bytes) -> dict[str, Any] | None:
    try:
        holder = json.loads(content)
    except ValueError:
        return None
    return holder if isinstance(holder, dict) else None


# --- Holders


def _describe_this_process() -> dict[str, Any]:
    pid = os.getpid()
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "pid": pid, "host": socket.gethostname(), "since": since, "machine": _machine(), "started": _started(pid),
    }  # fmt: skip


def _is_dead(holder: dict[str, Any]) -> bool:
    """Return whether it is known, without watching, that the holder does not run any more."""
    if holder.get("machine") and holder.get("machine") == _machine():
        return _started(holder.get("pid")) != holder.get("started")
    renewed = holder.get("renewed")
    return not isinstance(renewed, int | float) or time.time() - renewed > _CERTAIN


def _machine() -> str | None:
    """Return an identifier of the running kernel and of the process numbers in use; None on other systems."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: Any) -> str | None:
    """Return when a process was started, in ticks since the boot; None if it does not run."""
    try:
        with open(f"/proc/{int(pid)}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, TypeError, ValueError, IndexError):
        return None
