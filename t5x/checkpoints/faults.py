"""Turns environment errors (disk full, no permission, a directory gone) into UserErrors that name the fix."""

import errno
import os
import re

from etils import epath

from t5x.checkpoints import paths
from t5x.errors import UserError
from t5x.files.disk_space import free_bytes

_NAMED = 5  # removable directories listed in a message

# TensorStore raises ValueError("STATUS: text"); the text does not always include the system's error number.
_STATUS = re.compile(r"([A-Z][A-Z_]+): ")
_STATUS_NUMBERS = {"NOT_FOUND": errno.ENOENT, "PERMISSION_DENIED": errno.EACCES, "RESOURCE_EXHAUSTED": errno.ENOSPC}


class Vanished(UserError):
    """Files were removed while they were being written. The next save may succeed."""


def errno_of(error: BaseException) -> int | None:
    """Return the operating system's error number behind `error`, even if TensorStore wrapped it in its own text."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if match := re.search(r"\[os_error_code='(\d+)'", str(error)):
            return int(match[1])
        if isinstance(error, ValueError) and (status := tensorstore_status(error)):
            return _STATUS_NUMBERS.get(status, errno.EIO)
        error = error.__cause__ or error.__context__
    return None


def tensorstore_status(error: BaseException) -> str | None:
    """Return the status (such as DATA_LOSS) of a TensorStore error."""
    match = _STATUS.match(str(error))
    return match[1] if match else None


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an error, without the long specs that TensorStore appends."""
    line = (str(error).split(" [tensorstore_spec=")[0].splitlines() or [type(error).__name__])[0]
    return line if len(line) <= limit else line[:limit] + "…"


def check_space(directory: epath.Path, needed: int) -> None:
    """Raise the error of a full disk before gigabytes are written to it."""
    free = free_bytes(directory)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def explain_save(error: BaseException, *, directory: epath.Path, step: int, needed: int) -> BaseException:
    """Return the error to raise for `error` in a save: a UserError if the environment is the cause.

    Args:
      error: the error caught; the unfinished directory has been removed already.
      directory: MODEL_DIR.
      step: step of the checkpoint that could not be saved.
      needed: bytes of its arrays and sidecars.
    """
    number = errno_of(error)
    if number is None or isinstance(error, UserError) or not isinstance(error, Exception):
        return error
    if number in (errno.ENOSPC, errno.EDQUOT):
        message = _disk_full(directory, step, needed, number)
    else:
        mend = "Mend the directory (is it writable?) and start again."
        if number == errno.ENOENT:
            mend = "See what removes files there. A run that goes on tries again at its next checkpoint."
        message = (
            f"checkpoint_{step} could not be saved in {directory}: {os.strerror(number)} ({first_line(error)}). "
            f"{_newest(directory)} {mend}"
        )
    explained = Vanished(message) if number == errno.ENOENT else UserError(message)
    explained.__cause__ = error
    return explained


def _disk_full(directory: epath.Path, step: int, needed: int, number: int) -> str:
    cause = "the disk is full" if number == errno.ENOSPC else "the disk quota is reached"
    try:
        free = free_bytes(directory)
    except OSError:
        free = None
    free = "how much is free is unknown" if free is None else f"{paths.human_size(free)} are free"
    return (
        f"checkpoint_{step} could not be saved in {directory}: {cause}. "
        f"It needs about {paths.human_size(needed)}, {free}. "
        f"What was written of it has been removed. {_newest(directory)} {what_to_free(directory)} "
        "Then start again with the same command."
    )


def _newest(directory: epath.Path) -> str:
    steps = _finished(directory)
    if not steps:
        return "There is no earlier checkpoint here."
    return f"Earlier checkpoints are untouched; the newest is checkpoint_{max(steps)}."


def what_to_free(directory: epath.Path) -> str:
    """Return advice that names the damaged and the older checkpoints, oldest first, with their sizes."""
    finished = sorted(_finished(directory))
    aside = sorted(name for name in _entries(directory) if paths.is_set_aside(name))
    removable = aside + [paths.checkpoint_name(step) for step in finished[:-1]]
    if not removable:
        return "Free space on that disk, or choose a MODEL_DIR on a larger one."
    named = [f"{name} ({_size(directory / name)})" for name in removable[:_NAMED]]
    if len(removable) > _NAMED:
        named.append(f"{len(removable) - _NAMED} more")
    return f"Free space on that disk: you may delete {', '.join(named)}; a smaller `keep` removes old ones by itself."


def _size(path: epath.Path) -> str:
    try:
        return paths.human_size(paths.tree_size(path))
    except OSError as error:
        return f"of unknown size: {error.strerror}"


def _finished(directory: epath.Path) -> list[int]:
    return [step for name in _entries(directory) if (step := paths.step_of(name)) is not None]


def _entries(directory: epath.Path) -> list[str]:
    return os.listdir(directory) if os.path.isdir(directory) else []
