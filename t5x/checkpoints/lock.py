"""One trainer per MODEL_DIR."""

import datetime
import errno
import fcntl
import json
import os
import socket

from etils import epath

from t5x.checkpoints import paths
from t5x.errors import UserError

LOCK_FILE = ".lock"

# A lock belongs to the open file, which a forked child (a data worker) would share and keep alive after the trainer
# has died. So children close it.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class ModelDirLock:
    """Exclusive right to write in a MODEL_DIR, from construction to release() or the death of the process.

    The lock is the kernel's (`flock` on MODEL_DIR/.lock): a killed process cannot leave it behind. The file itself
    stays, and says who holds it. MODEL_DIR is created if only it is missing.

        with ModelDirLock(model_dir):
            train()

    Raises:
      UserError: another process holds it (the message says which, where and since when), or MODEL_DIR is unusable.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = paths.make_model_dir(directory)
        self._descriptor: int | None = None
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
        except OSError as error:
            os.close(descriptor)
            raise UserError(self._explain(error)) from error
        self._descriptor = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Lets the next one in. May be called twice."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

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
    try:
        with open(os.path.join(directory, LOCK_FILE), "rb") as file:
            owner = json.loads(file.read(4096))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
