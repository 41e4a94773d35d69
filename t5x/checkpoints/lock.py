"""One trainer per MODEL_DIR."""

import datetime
import errno
import fcntl
import json
import os
import socket
import threading
import time
from typing import Any

from etils import epath

from t5x.checkpoints import agreement, faults, paths
from t5x.errors import UserError

LOCK_FILE = ".lock"

# A lock belongs to the open file, which a forked child (a data worker) would share and keep alive after the trainer
# has died. So children close it.
_held: dict[int, "ModelDirLock"] = {}
_renewal = threading.Lock()

_SHARED_PATIENCE = 30  # seconds until a file that another host has written must be visible here


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class ModelDirLock:
    """Exclusive right to write in a MODEL_DIR, from construction to release() or the death of the process.

    The lock is the kernel's (`flock` on MODEL_DIR/.lock): a killed process cannot leave it behind. The file itself
    stays, and says who holds it. MODEL_DIR is created if only it is missing. Where several processes run together,
    process 0 holds the lock for all of them.

        with ModelDirLock(model_dir):
            train()

    Raises:
      UserError: another process holds it (the message says which, where and since when), or MODEL_DIR is unusable.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = paths.local_path(directory)
        self._descriptor: int | None = None
        owner = agreement.decide(f"lock/{self.directory}", self._take)
        try:
            agreement.check_all(f"lock/{self.directory}/seen", self._not_shared(owner))
        except Exception:
            self.release()
            raise

    def _take(self) -> dict[str, Any]:
        """Takes it, in process 0; returns what the file says of it."""
        paths.make_model_dir(self.directory)
        path = self.directory / LOCK_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"MODEL_DIR {self.directory} is not usable: {path}: {error.strerror}.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            os.fsync(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise UserError(self._explain(error)) from error
        self._descriptor = descriptor
        _held[descriptor] = self
        return owner

    def _not_shared(self, owner: dict[str, Any]) -> UserError | None:
        """What is wrong where this process does not see the lock that process 0 holds."""
        for _ in range(_SHARED_PATIENCE):
            if _read_owner(self.directory) == owner:
                return None
            time.sleep(1)
        return UserError(
            f"MODEL_DIR {self.directory} is not the same directory on {socket.gethostname()} and on {owner['host']}: "
            "processes that train together need one on a file system that they share."
        )

    def release(self) -> None:
        """Lets the next one in. May be called twice."""
        if self._descriptor in _held:
            del _held[self._descriptor]
            os.close(self._descriptor)
        self._descriptor = None

    def renew(self) -> bool:
        """Takes it again if MODEL_DIR has been removed. False: the directory above is gone too, perhaps with a disk."""
        if not self.directory.parent.is_dir():
            return False
        renew(self.directory)
        return True

    def what_to_free(self) -> str:
        """Which files of the run may be deleted where its disk is full."""
        return faults.what_to_free(self.directory)

    def _is_on_disk(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.directory / LOCK_FILE))
        except FileNotFoundError:
            return False

    def __enter__(self) -> "ModelDirLock":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def _explain(self, error: OSError) -> str:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return (
                f"MODEL_DIR {self.directory} is in use by {describe_owner(self.directory)}. "
                "Stop that run, or choose another MODEL_DIR for this one."
            )
        return (
            f"MODEL_DIR {self.directory} cannot be locked: {error.strerror}. Mend that, or choose one on a disk "
            "with space left and with flock: without a lock two runs could overwrite each other."
        )


def renew(directory: epath.PathLike) -> None:
    """Takes the lock of MODEL_DIR again if we hold it and its file has been removed, with MODEL_DIR or alone."""
    with _renewal:
        for held in [held for held in _held.values() if held.directory == paths.local_path(directory)]:
            if not held._is_on_disk():
                held.release()
                held._take()


def is_held_elsewhere(directory: epath.PathLike) -> bool:
    """Whether another process holds the lock of this MODEL_DIR at this moment."""
    try:
        descriptor = os.open(os.path.join(directory, LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if any(os.path.sameopenfile(descriptor, ours) for ours in _held):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return True
        raise
    finally:
        os.close(descriptor)


def describe_owner(directory: epath.PathLike) -> str:
    """Who last took the lock, in words."""
    owner = _read_owner(directory)
    return "another process" if owner is None else f"process {owner['pid']} on {owner['host']} since {owner['since']}"


def _read_owner(directory: epath.PathLike) -> dict[str, Any] | None:
    try:
        with open(os.path.join(directory, LOCK_FILE), "rb") as file:
            owner = json.loads(file.read(4096))
        return {name: owner[name] for name in ("pid", "host", "since")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
