"""T5X's functions for the directories of checkpoints: pins, removal and formats."""

import enum
import glob
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from t5x.checkpoints import paths, tree
from t5x.checkpoints.formats import open_checkpoint
from t5x.files.directory import open_directory

log = logging.getLogger(__name__)


class CheckpointTypes(enum.Enum):
    ORBAX = "ORBAX"
    T5X = "T5X"
    T5X_TF = "T5X_TF"


def detect_checkpoint_type(checkpoint_path: str, expected: CheckpointTypes | None = None) -> CheckpointTypes:
    """Return the format of a checkpoint, given its file `checkpoint`; log a warning if another one is expected."""
    path = os.fspath(checkpoint_path)
    actual = CheckpointTypes.T5X
    if os.path.exists(os.path.join(os.path.dirname(path), "_METADATA")):
        actual = CheckpointTypes.ORBAX
    else:
        with open(path, "rb") as file:
            if file.read(21) == b"model_checkpoint_path":
                actual = CheckpointTypes.T5X_TF
    if expected not in (None, actual):
        log.warning("%s has the format %s, not %s", path, actual.value, expected.value)
    return actual


def pinned_checkpoint_filepath(ckpt_dir: str) -> str:
    return os.path.join(ckpt_dir, paths.PINNED)


def is_pinned_checkpoint(ckpt_dir: str) -> bool:
    """Return whether retention must keep a checkpoint."""
    return open_directory(ckpt_dir).exists(paths.PINNED)


def pin_checkpoint(ckpt_dir: str, txt: str = "1") -> None:
    """Protect a checkpoint from retention."""
    Path(pinned_checkpoint_filepath(ckpt_dir)).write_text(txt)


def unpin_checkpoint(ckpt_dir: str) -> None:
    """Allow retention to remove a checkpoint."""
    if is_pinned_checkpoint(ckpt_dir):
        os.remove(pinned_checkpoint_filepath(ckpt_dir))


def remove_checkpoint_dir(ckpt_dir: str) -> None:
    """Remove the directory of a checkpoint that is not pinned."""
    if is_pinned_checkpoint(ckpt_dir):
        log.info("%s is pinned and is kept", ckpt_dir)
    else:
        shutil.rmtree(ckpt_dir)


def remove_dataset_checkpoint(ckpt_dir: str, train_ds_prefix: str) -> None:
    """Remove the files with the position in the data (`<train_ds_prefix>*`), unless the checkpoint is pinned."""
    if is_pinned_checkpoint(ckpt_dir):
        log.info("%s is pinned and is kept", ckpt_dir)
        return
    for file in glob.glob(os.path.join(glob.escape(ckpt_dir), f"{train_ds_prefix}*")):
        os.remove(file)


def get_restore_parameters(directory: str, structure: Any) -> Any:
    """Return `structure` with a description of each array of a checkpoint as its leaves."""
    arrays = open_checkpoint(directory).arrays
    return tree.nest({name: arrays.get(name) for name in tree.flatten(structure)})
