"""Names inside MODEL_DIR, and walks over its files.

MODEL_DIR/
  .lock                                     held by the training process (see model_dir_lock.py)
  checkpoint_<step>/                        a complete checkpoint; incomplete ones never have this name
    state/                                  the arrays (see array_reader.py)
    dataset/train-000-of-001.json           the position in the training data
    model.json  vocabulary/…  config.gin    other files that the caller passes
    MANIFEST.json                           size and SHA-256 of all of the above (see manifest.py)
    PINNED                                  optional: protects the checkpoint from retention
    UNFINISHED                              in object stores, which cannot rename: without MANIFEST.json beside it, the
                                            checkpoint is being written or removed
  checkpoint_<step>.tmp-<unique>/           being written or removed; not to be read
  checkpoint_<step>.damaged-<unique>/       moved aside because a complete one took its place
  checkpoint_<step>.foreign-<unique>/       the same, for a directory that is not a checkpoint of this program
"""

import contextlib
import os
import re
from collections.abc import Iterator

from etils import epath

from t5x._runtime.errors import UserError
from t5x.files import atomic
from t5x.files import directory as directory_files
from t5x.files.directory import Directory
from t5x.files.disk_space import human_size as human_size
from t5x.files.local import LocalDirectory, Publication
from t5x.files.local import walk as walk
from t5x.files.local import write_file as write_file
from t5x.files.remote import RemotePath, is_remote
from t5x.files.remote_directory import UNFINISHED as UNFINISHED
from t5x.files.remote_directory import RemoteDirectory
from t5x.files.storage_errors import errno_of, first_line
from t5x.files.untrusted import is_plain_relative as is_plain_relative
from t5x.telemetry import copy_progress

STATE = "state"
MANIFEST = "MANIFEST.json"
PINNED = "PINNED"
DATASET_STATE = "dataset/train-000-of-001.json"  # the data position of all rows, for any number of processes
_MAX_LISTED = 5  # removable directories in a message

MARKERS = (MANIFEST, "config.json", "checkpoint", "_METADATA", "manifest.ocdbt")  # of ours, and of other formats
_STEP = r"checkpoint_(0|[1-9][0-9]*)"
CHECKPOINTS = Publication(_STEP, MARKERS, progress=copy_progress)


def location(path: epath.PathLike) -> str:
    """Return `path` as an absolute local path or, if it is remote, as the URL."""
    text = os.fspath(path)
    return text.rstrip("/") if is_remote(text) else str(local_path(text))


def local_path(path: epath.PathLike) -> epath.Path:
    """Return `path` as an absolute local path; raise a UserError if it is remote (see `remote_reading`)."""
    text = os.fspath(path)
    if is_remote(text):
        raise UserError(
            f"{text}: remote checkpoint directories are not supported here. Choose a local (or mounted) directory, and "
            "copy finished checkpoint_<step> directories from there. A checkpoint that is only read "
            "(INITIAL_CHECKPOINT_PATH, `t5x infer --model`, `t5x convert`) may be remote."
        )
    return epath.Path(os.path.abspath(os.path.expanduser(text)))


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step}"


def renamed(step: int) -> str:
    """Return the problem of a checkpoint whose content is of `step`, but whose name has another step."""
    return f"its content is of step {step}: it was renamed or copied. Name it {checkpoint_name(step)}, or move it away"


def step_of(path: epath.PathLike) -> int | None:
    """Return the step in the name of a finished checkpoint, or None for any other name."""
    match = re.fullmatch(_STEP, os.path.basename(os.fspath(path)))
    return int(match[1]) if match else None


def list_steps(directory: epath.PathLike) -> list[int]:
    """Return the steps of the finished checkpoints in a local MODEL_DIR, ascending; empty if it does not exist.

    An empty directory is not a checkpoint.
    """
    return published_steps(LocalDirectory(os.fspath(directory)))


def published_steps(directory: Directory) -> list[int]:
    """Return the steps of the finished checkpoints in a MODEL_DIR, ascending."""
    children = directory.children(CHECKPOINTS)
    return sorted(step for name, finished in children.items() if finished and (step := step_of(name)) is not None)


def open_files(path: epath.PathLike) -> Directory:
    """Return the files of the checkpoint at a local path or URL. They are untrusted: nothing outside it is opened."""
    path = location(path)
    return RemoteDirectory(RemotePath.parse(path)) if is_remote(path) else LocalDirectory(path, follow_links=False)


def make_directory(directory: epath.PathLike, name: str) -> epath.Path:
    """Create a local directory that the user gave as option `name`; raise a UserError with the reason if that fails."""
    return epath.Path(directory_files.make_directory(local_path(directory), name))


def make_model_dir(directory: epath.PathLike) -> epath.Path:
    return make_directory(directory, "MODEL_DIR")


def tree_size(directory: epath.PathLike) -> int:
    """Return the total bytes of all files below `directory`."""
    return sum(status.st_size for _, status in walk(directory))


def what_to_free(directory: epath.PathLike) -> str:
    """Return advice that names the damaged and the older checkpoints, oldest first, with their sizes."""
    if is_remote(directory):  # metrics and arrays wait on a local disk until they are uploaded
        return "Free space on that disk, or set T5X_CACHE_DIR to a directory on a larger one."
    entries = os.listdir(directory) if os.path.isdir(directory) else []
    aside = sorted(name for name in entries if re.fullmatch(_STEP + r"\.damaged-.+", name))
    removable = aside + [checkpoint_name(step) for step in list_steps(directory)[:-1]]
    if not removable:
        return "Free space on that disk, or choose a MODEL_DIR on a larger one."
    listed = [f"{name} ({_size(os.path.join(directory, name))})" for name in removable[:_MAX_LISTED]]
    if len(removable) > _MAX_LISTED:
        listed.append(f"{len(removable) - _MAX_LISTED} more")
    return f"Free space on that disk: you may delete {', '.join(listed)}; a smaller `keep` removes old ones by itself."


def _size(path: epath.PathLike) -> str:
    try:
        return human_size(tree_size(path))
    except OSError as error:
        return f"unknown size: {error.strerror}"


@contextlib.contextmanager
def new_checkpoint(path: epath.PathLike) -> Iterator[epath.Path]:
    """Yield an empty directory that becomes `path` when the block ends without an error; otherwise nothing is left.

    Raises:
      UserError: `path` is remote, exists, or cannot be written.
    """
    final = local_path(path)
    if os.path.lexists(final):
        raise UserError(f"{final} exists already. Choose another destination, or move it away.")
    try:
        with atomic.new_directory(final) as temporary:
            yield epath.Path(temporary)
    except (OSError, ValueError) as error:  # TensorStore raises a ValueError
        if isinstance(error, ValueError) and (isinstance(error, UserError) or errno_of(error) is None):
            raise
        raise UserError(
            f"{final} could not be written: {first_line(error)}. The incomplete copy was removed. Check that the disk "
            "has space and that you may write there, or choose another destination."
        ) from error
