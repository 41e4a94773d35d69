"""Turns environment errors of a save (disk full, no permission, a directory gone) into UserErrors that name the fix."""

import errno
import os

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.files.disk_space import free_bytes
from t5x.files.remote import is_remote
from t5x.files.storage_errors import errno_of, explained, first_line, tensorstore_status

_MAX_LISTED = 5  # removable directories in a message


class VanishedFiles(UserError):
    """Files were removed while they were being written. The next save may succeed."""


def explain_access(error: BaseException, directory: epath.PathLike) -> BaseException:
    """Return the error to raise for one of a remote MODEL_DIR's driver; any other error as it is."""
    from_driver = isinstance(error, OSError) or (isinstance(error, ValueError) and tensorstore_status(error))
    if isinstance(error, UserError) or not is_remote(directory) or not from_driver:
        return error
    try:
        with explained(os.fspath(directory)):
            raise error
    except UserError as understandable:
        return understandable


def explain(error: BaseException, *, directory: epath.PathLike, step: int, needed: int) -> BaseException:
    """Return the error to raise for `error` in a save: a UserError if the environment is the cause.

    Args:
      error: the error caught; the unfinished directory has been removed already.
      directory: MODEL_DIR.
      step: step of the checkpoint that could not be saved.
      needed: bytes of its arrays and sidecars.
    """
    error = explain_access(error, directory)
    number = errno_of(error)
    if number is None or isinstance(error, UserError) or not isinstance(error, Exception):
        return error
    steps = paths.list_steps(directory)
    newest = (
        f"Earlier checkpoints are untouched; the newest is checkpoint_{max(steps)}."
        if steps
        else "There is no earlier checkpoint here."
    )
    kind = UserError
    if number in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full" if number == errno.ENOSPC else "the disk quota is reached"
        reason += f". It needs about {paths.human_size(needed)}, {_free_space(directory)}"
        fix = f"{what_to_free(directory)} Then restart with the same command."
    else:
        reason = f"{os.strerror(number)} ({first_line(error)})"
        fix = "Make the directory writable and restart with the same command."
        if number == errno.ENOENT:
            kind = VanishedFiles
            fix = "Find out what removes files there. If the run continues, it tries again at its next checkpoint."
    explained = kind(f"checkpoint_{step} could not be saved in {directory}: {reason}. {newest} {fix}")
    explained.__cause__ = error
    return explained


def what_to_free(directory: epath.PathLike) -> str:
    """Return advice that names the damaged and the older checkpoints, oldest first, with their sizes."""
    if is_remote(directory):  # metrics and arrays wait on a local disk until they are uploaded
        return "Free space on that disk, or set T5X_CACHE_DIR to a directory on a larger one."
    entries = os.listdir(directory) if os.path.isdir(directory) else []
    aside = sorted(name for name in entries if paths.is_set_aside(name))
    removable = aside + [paths.checkpoint_name(step) for step in paths.list_steps(directory)[:-1]]
    if not removable:
        return "Free space on that disk, or choose a MODEL_DIR on a larger one."
    listed = [f"{name} ({_size(os.path.join(directory, name))})" for name in removable[:_MAX_LISTED]]
    if len(removable) > _MAX_LISTED:
        listed.append(f"{len(removable) - _MAX_LISTED} more")
    return f"Free space on that disk: you may delete {', '.join(listed)}; a smaller `keep` removes old ones by itself."


def _free_space(directory: epath.PathLike) -> str:
    try:
        free = free_bytes(directory)
    except OSError:
        free = None
    return "the free space is unknown" if free is None else f"{paths.human_size(free)} are free"


def _size(path: epath.PathLike) -> str:
    try:
        return paths.human_size(paths.tree_size(path))
    except OSError as error:
        return f"unknown size: {error.strerror}"
