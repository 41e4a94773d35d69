"""The lock that allows one trainer per MODEL_DIR."""

import datetime
import json
import os
import socket
import threading
import time
from typing import Any

from etils import epath

from t5x.checkpoints import paths, save_errors
from t5x.errors import UserError
from t5x.files import locks
from t5x.partitioning import distributed

LOCK_FILE = ".lock"

_taken: set["ModelDirLock"] = set()
_renewal = threading.Lock()

_SHARED_PATIENCE = 30  # seconds until a file written by another host must be visible


class ModelDirLock:
    """Exclusive right to write in a MODEL_DIR, from construction to release() or the death of the process.

    The lock is the kernel's (`flock` on MODEL_DIR/.lock), so a killed process cannot leave it behind. The file itself
    stays and names the holder. MODEL_DIR is created if it is missing. With several processes, process 0 holds the
    lock for all of them.

        with ModelDirLock(model_dir):
            train()

    Raises:
      UserError: another process holds it (the message says which, where and since when), or MODEL_DIR is unusable.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = paths.local_path(directory)
        self._descriptor: int | None = None
        owner = distributed.decide(f"lock/{self.directory}", self._take)
        try:
            distributed.check_all(f"lock/{self.directory}/seen", self._not_shared(owner))
        except Exception:
            self.release()
            raise

    def _take(self) -> dict[str, Any]:
        """Take the lock, on process 0; return the content of the lock file."""
        paths.make_model_dir(self.directory)
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        try:
            self._descriptor = locks.acquire(self.directory / LOCK_FILE)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)
            os.fsync(self._descriptor)  # other hosts read it
        except BlockingIOError as error:
            raise UserError(
                f"MODEL_DIR {self.directory} is in use by {describe_owner(self.directory)}. Stop that run, or choose "
                "another MODEL_DIR for this one."
            ) from error
        except OSError as error:
            self.release()
            raise UserError(
                f"MODEL_DIR {self.directory} cannot be locked: {error.strerror}. Choose one on a disk with free space "
                "and with support for flock: without a lock, two runs could overwrite each other."
            ) from error
        _taken.add(self)
        return owner

    def _not_shared(self, owner: dict[str, Any]) -> UserError | None:
        """Return an error if this process cannot see the lock that process 0 holds."""
        for _ in range(_SHARED_PATIENCE):
            if _read_owner(self.directory) == owner:
                return None
            time.sleep(1)
        return UserError(
            f"MODEL_DIR {self.directory} is not the same directory on {socket.gethostname()} and on {owner['host']}. "
            "Choose one on a file system that all processes of the run share."
        )

    def release(self) -> None:
        """Release the lock. May be called twice."""
        locks.release(self._descriptor)
        self._descriptor = None
        _taken.discard(self)

    def renew(self) -> bool:
        """Take the lock again if MODEL_DIR was removed. Return False if its parent is gone too, perhaps with a disk."""
        if not self.directory.parent.is_dir():
            return False
        renew(self.directory)
        return True

    def what_to_free(self) -> str:
        """Return advice on which files of the run may be deleted if its disk is full."""
        return save_errors.what_to_free(self.directory)

    def __enter__(self) -> "ModelDirLock":
        return self

    def __exit__(self, *_) -> None:
        self.release()


def renew(directory: epath.PathLike) -> None:
    """Take the lock of MODEL_DIR again if we hold it and its file was removed, with or without MODEL_DIR."""
    path = paths.local_path(directory)
    with _renewal:
        for held in [held for held in _taken if held.directory == path]:
            if locks.is_held(held._descriptor) and not locks.is_at(held._descriptor, path / LOCK_FILE):
                held.release()
                held._take()


def is_held_elsewhere(directory: epath.PathLike) -> bool:
    """Return whether another process currently holds the lock of this MODEL_DIR."""
    return locks.is_held_elsewhere(os.path.join(directory, LOCK_FILE))


def describe_owner(directory: epath.PathLike) -> str:
    """Return a description of the process that last took the lock."""
    owner = _read_owner(directory)
    return "another process" if owner is None else f"process {owner['pid']} on {owner['host']} since {owner['since']}"


def _read_owner(directory: epath.PathLike) -> dict[str, Any] | None:
    try:
        with open(os.path.join(directory, LOCK_FILE), "rb") as file:
            owner = json.loads(file.read(4096))
        return {name: owner[name] for name in ("pid", "host", "since")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
