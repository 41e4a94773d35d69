"""Names inside MODEL_DIR, and the few file system operations that make a checkpoint durable.

MODEL_DIR/
  .lock                                     held by the training process (see lock.py)
  checkpoint_<step>/                        whole, or it is not there under this name
    state/                                  the arrays (see arrays.py)
    dataset/train-<process>-of-<n>.json     where the training data stood
    model.json  vocabulary/…  config.gin    whatever else the caller hands over
    MANIFEST.json                           size and SHA-256 of all of the above (see manifest.py)
    PINNED                                  optional: never removed by retention
  checkpoint_<step>.tmp-<unique>/           being written or being removed; of no use to anybody else
  checkpoint_<step>.damaged-<unique>/       moved aside because a whole one took its place
"""

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator

from etils import epath

from t5x.cache_directory import human_size as human_size
from t5x.errors import UserError
from t5x.urls import is_remote

STATE = "state"
MANIFEST = "MANIFEST.json"
PINNED = "PINNED"

_STEP = r"checkpoint_(0|[1-9][0-9]*)"


def local_path(path: epath.PathLike) -> epath.Path:
    """The absolute local path meant by `path`; UserError when it is remote (remote.stage copies what is only read)."""
    text = os.fspath(path)
    if is_remote(text):
        raise UserError(
            f"{text}: remote checkpoint directories are not supported here: a run writes to a local (or mounted) "
            "directory. Give one, and copy finished checkpoint_<step> directories from there. A checkpoint that is "
            "only read (INITIAL_CHECKPOINT_PATH, `t5x infer --model`, `t5x convert`) may be remote."
        )
    return epath.Path(os.path.abspath(os.path.expanduser(text)))


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step}"


def unique_name(step: int, purpose: str) -> str:
    """A fresh name beside `checkpoint_<step>`; purpose is "tmp" or "damaged"."""
    return f"checkpoint_{step}.{purpose}-{int(time.time())}-{os.getpid()}-{secrets.token_hex(4)}"


def step_of(path: epath.PathLike) -> int | None:
    """The step in the name of a finished checkpoint, None for any other name."""
    match = re.fullmatch(_STEP, os.path.basename(os.fspath(path)))
    return int(match[1]) if match else None


def is_temporary(path: epath.PathLike) -> bool:
    return re.fullmatch(_STEP + r"\.tmp-.+", os.path.basename(os.fspath(path))) is not None


def is_set_aside(path: epath.PathLike) -> bool:
    return re.fullmatch(_STEP + r"\.damaged-.+", os.path.basename(os.fspath(path))) is not None


def dataset_state_name(process_index: int | None = None, process_count: int | None = None) -> str:
    """The sidecar that holds one process's data state; by default this process of this JAX run.

    >>> dataset_state_name(0, 1)
    'dataset/train-000-of-001.json'
    """
    if process_index is None or process_count is None:
        import jax

        process_index = jax.process_index() if process_index is None else process_index
        process_count = jax.process_count() if process_count is None else process_count
    return f"dataset/train-{process_index:03d}-of-{process_count:03d}.json"


def is_plain_relative(name: str) -> bool:
    """Whether `name` is a relative path of ordinary parts, with `/` between them: it cannot leave its directory."""
    return all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in name.split("/"))


def make_directory(directory: epath.PathLike, name: str) -> epath.Path:
    """Creates a directory that the user gave as `name`, or raises a UserError that says what is in the way."""
    directory = local_path(directory)
    if directory.is_dir():
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UserError(f"{name} {directory} is not writable. Give yourself write permission or choose another.")
        return directory
    if os.path.lexists(directory):
        raise UserError(f"{name} {directory} exists but is not a directory. Move it away or choose another path.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name} {directory} cannot be created: {error.strerror}. Choose another path.") from error
    return directory


def make_model_dir(directory: epath.PathLike) -> epath.Path:
    return make_directory(directory, "MODEL_DIR")


def walk(directory: epath.PathLike) -> Iterator[tuple[str, os.stat_result]]:
    """Yields (path relative to `directory`, lstat) of everything below it that is not a directory; follows no links."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(directory, prefix)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                relative = prefix + entry.name
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(relative + "/")
                else:
                    yield relative, status


def tree_size(directory: epath.PathLike) -> int:
    """Bytes of all files below `directory`."""
    return sum(status.st_size for _, status in walk(directory))


def write_file(path: epath.PathLike, content: bytes) -> None:
    """Writes a new file, creating the directories above it. Durable only after fsync_tree or fsync."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)


def fsync(path: epath.PathLike) -> None:
    """Flushes one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: epath.PathLike) -> None:
    """Flushes every file and directory below `directory`, and itself."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            fsync(os.path.join(parent, name))
        fsync(parent)


def remove_tree(directory: epath.PathLike, *, quiet_rounds: int = 1) -> bool:
    """Removes a directory, if it is there. Returns whether it is gone.

    Threads that still write to it may put it back: it counts as gone after `quiet_rounds` looks 20 ms apart.
    """
    quiet = 0
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        quiet = 0 if os.path.lexists(directory) else quiet + 1
        if quiet == quiet_rounds:
            return True
        time.sleep(0.02)
    return False
