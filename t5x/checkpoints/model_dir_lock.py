"""The lock that allows one trainer per MODEL_DIR."""

import datetime
import json
import os
import socket
import threading
import time
from typing import Any

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.files import lease, locks
from t5x.files.lease import Lease
from t5x.files.remote import is_remote
from t5x.partitioning import distributed

LOCK_FILE = ".lock"
LEASE_FILE = ".lease"

_held_locks: set["ModelDirLock"] = set()
_renewal = threading.Lock()

_SHARED_PATIENCE = 30  # seconds until a file written by another host must be visible


class ModelDirLock:
    """Exclusive right to write in a MODEL_DIR, from construction to release() or the death of the process.

    In a local directory, which is created if it is missing, the lock is the kernel's (`flock` on MODEL_DIR/.lock), so a
    killed process cannot leave it behind. The file itself stays and names the holder. A remote MODEL_DIR has a lease
    (MODEL_DIR/.lease, see files/lease.py). With several processes, process 0 holds the lock for all of them.

        with ModelDirLock(model_dir):
            train()

    Raises:
      UserError: another process holds it (the message names it, its host and its start), or MODEL_DIR is unusable.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = paths.location(directory)
        self._descriptor: int | None = None
        self._lease: Lease | None = None
        owner = distributed.decide(f"lock/{self.directory}", self._take)
        try:
            with distributed.failing_together(f"lock/{self.directory}/seen"):
                self._check_shared(owner)
        except Exception:
            self.release()
            raise

    def _take(self) -> dict[str, Any]:
        """Take the lock, on process 0; return the record of its owner in the lock's file."""
        if is_remote(self.directory):
            self._lease = Lease.acquire(f"{self.directory}/{LEASE_FILE}", f"MODEL_DIR {self.directory}")
            owner = self._lease.holder
        else:
            owner = self._lock()
        _held_locks.add(self)
        return _owner(owner)

    def _lock(self) -> dict[str, Any]:
        paths.make_model_dir(self.directory)
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        descriptor = None
        try:
            descriptor = locks.acquire(os.path.join(self.directory, LOCK_FILE))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            os.fsync(descriptor)  # other hosts read it
        except BlockingIOError as error:
            raise UserError(
                f"MODEL_DIR {self.directory} is in use by {describe_owner(self.directory)}. Stop that run, or choose "
                "another MODEL_DIR for this one."
            ) from error
        except OSError as error:
            locks.release(descriptor)
            raise UserError(
                f"MODEL_DIR {self.directory} cannot be locked: {error.strerror}. Choose one on a disk with free space "
                "and with support for flock: without a lock, two runs could overwrite each other."
            ) from error
        self._descriptor = descriptor
        return owner

    def _check_shared(self, owner: dict[str, Any]) -> None:
        """Raise a UserError if this process cannot see the lock that process 0 holds."""
        for _ in range(_SHARED_PATIENCE):
            if _read_owner(self.directory) == owner:
                return
            time.sleep(1)
        raise UserError(
            f"MODEL_DIR {self.directory} is not the same directory on {socket.gethostname()} and on {owner['host']}. "
            "Choose one on a file system that all processes of the run share, or a URL (gs://…, s3://…)."
        )

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._lease is not None:
            self._lease.release()
        locks.release(self._descriptor)
        self._descriptor = None
        _held_locks.discard(self)

    def renew(self) -> bool:
        """Take the lock again if MODEL_DIR was removed. Return False if its parent is gone too, perhaps with a disk."""
        if not is_remote(self.directory) and not os.path.isdir(os.path.dirname(self.directory)):
            return False
        renew(self.directory)
        return True

    def what_to_free(self) -> str:
        """Return advice on which files of the run may be deleted if its disk is full."""
        return paths.what_to_free(self.directory)

    def __enter__(self) -> "ModelDirLock":
        return self

    def __exit__(self, *_) -> None:
        self.release()


def renew(directory: epath.PathLike) -> None:
    """Make sure that we still hold the lock of MODEL_DIR, if we have taken it.

    A lock whose file was removed, with or without MODEL_DIR, is taken again.

    Raises:
      UserError: another process has taken it. Every further call raises it too, while that process runs.
    """
    path = paths.location(directory)
    lock_file = os.path.join(path, LOCK_FILE)
    with _renewal:
        for held in [held for held in _held_locks if held.directory == path]:
            if held._lease is not None:
                held._lease.check()
            elif (fd := held._descriptor) is not None and locks.is_held(fd) and not locks.is_at(fd, lock_file):
                held._take()
                locks.release(fd)  # kept until now: after a failure, the next call must notice the loss again


def is_held_elsewhere(directory: epath.PathLike) -> bool:
    """Return whether another process currently holds the lock of this MODEL_DIR."""
    path = paths.location(directory)
    if not is_remote(path):
        return locks.is_held_elsewhere(os.path.join(path, LOCK_FILE))
    own = [_owner(held._lease.holder) for held in _held_locks if held.directory == path and held._lease is not None]
    return (owner := _read_owner(path)) is not None and owner not in own


def describe_owner(directory: epath.PathLike) -> str:
    """Return a description of the process that last took the lock."""
    owner = _read_owner(paths.location(directory))
    return "another process" if owner is None else lease.describe(owner)


def _read_owner(directory: str) -> dict[str, Any] | None:
    try:
        if is_remote(directory):
            holder = lease.read_holder(f"{directory}/{LEASE_FILE}")
            return None if holder is None else _owner(holder)
        with open(os.path.join(directory, LOCK_FILE), "rb") as file:
            return _owner(json.loads(file.read(4096)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _owner(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("pid", "host", "since")}
