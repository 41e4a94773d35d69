"""Every checkpoint a T5 user has: which format a path is, and opening it.

Readers are imported when a checkpoint of their format is met.
"""

import logging
import os

from etils import epath

from t5x.checkpoints import paths, remote
from t5x.checkpoints.formats.base import LazyArray, Source
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError

__all__ = ["LazyArray", "Source", "is_own_checkpoint", "open_checkpoint"]

log = logging.getLogger(__name__)

_NATIVE = "checkpoint"
_HUGGINGFACE = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ORBAX = ("_METADATA", "manifest.ocdbt", f"{paths.STATE}/_METADATA")
_TENSORFLOW_STATE = b"model_checkpoint_path"


def open_checkpoint(path: epath.PathLike, *, verify: bool = True) -> Source:
    """Opens a checkpoint of any format; nothing but its index is read.

    Args:
      path: ours, native T5X's or T5X's Orbax's (a `checkpoint_<step>` directory, or the MODEL_DIR above, of which the
        newest that can be opened is taken), Mesh TensorFlow's (`model.ckpt-N`, its `.index`, or the directory), or a
        Hugging Face directory. A remote one (`gs://…`) is copied to the cache directory first.
      verify: check the files of one of ours against its manifest. Pass False if that has just been done.
    """
    from t5x.checkpoints import reading

    if not os.fspath(path):
        raise UserError("The path of the checkpoint is empty. Give a checkpoint, or the MODEL_DIR of a run.")
    path = remote.stage(path)
    if not _has(path, paths.MANIFEST, _HUGGINGFACE, *_ORBAX) and (steps := reading.list_steps(path)):
        return _open_newest(path, steps, verify)
    return _open(path, verify)


def is_own_checkpoint(directory: epath.Path) -> bool:
    """Whether a directory is, by its content, a checkpoint of a kind that is written here; it may be damaged."""
    from t5x.checkpoints.formats import lazy_msgpack

    try:
        if os.path.isfile(directory / paths.MANIFEST):
            with open(directory / paths.MANIFEST, "rb") as file:
                return b'"format": "t5x"' in file.read(200)
        if os.path.isfile(directory / _NATIVE):
            return lazy_msgpack.is_tree(directory / _NATIVE)
    except OSError:
        return False
    return _has(directory, _HUGGINGFACE) and _has(directory, *_WEIGHTS)


def _open_newest(directory: epath.Path, steps: list[int], verify: bool) -> Source:
    """The newest checkpoint of a MODEL_DIR that can be opened; which it is, and which were passed over, is logged."""
    passed = []
    for step in reversed(steps):
        path = directory / paths.checkpoint_name(step)
        try:
            source = _open(path, verify)
        except UserError as error:
            if path.exists():  # else a trainer's retention has just removed it
                reason = error.reason if isinstance(error, DamagedCheckpoint) else str(error)
                passed.append(f"  {path.name}: {reason}")
                log.warning("Passing over %s: %s", path, reason)
            continue
        log.info("%s: taking its newest whole checkpoint, %s", directory, path.name)
        return source
    reasons = "\n".join(passed)
    raise UserError(
        f"{directory} is neither a checkpoint nor a MODEL_DIR to take one from: none of its checkpoints is whole.\n"
        f"{reasons}"
    )


def _open(path: epath.Path, verify: bool) -> Source:
    if path.suffix == ".index" or epath.Path(f"{path}.index").exists():
        from t5x.checkpoints.formats.mesh_tensorflow import read_mesh_tensorflow

        return read_mesh_tensorflow(path)
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint {path}: no such file or directory.")
    if _has(path, paths.MANIFEST):
        from t5x.checkpoints import reading
        from t5x.checkpoints.formats.ours import read_ours

        return read_ours(reading.resolve_verified(path) if verify else path)
    if _has(path, _HUGGINGFACE):
        from t5x.checkpoints.formats.huggingface import read_huggingface

        return read_huggingface(path)
    if _has(path, *_ORBAX):
        from t5x.checkpoints.formats.orbax import read_orbax

        return read_orbax(path)
    if any(name.endswith(".index") for name in os.listdir(path)):
        from t5x.checkpoints.formats.mesh_tensorflow import read_mesh_tensorflow

        return read_mesh_tensorflow(path)
    if _has(path, _NATIVE):
        if b"PLACEHOLDER://" in (path / _NATIVE).read_bytes()[:1_000_000]:  # an early version of Orbax
            from t5x.checkpoints.formats.orbax import read_orbax

            return read_orbax(path)
        from t5x.checkpoints.formats.native import read_native

        return read_native(path)
    raise _unknown(path)


def _open_file(path: epath.Path) -> Source:
    """The msgpack file of a native checkpoint: the only single file that is one."""
    from t5x.checkpoints.formats import lazy_msgpack
    from t5x.checkpoints.formats.native import read_native

    try:
        with open(path, "rb") as file:
            known = file.read(len(_TENSORFLOW_STATE)) == _TENSORFLOW_STATE or lazy_msgpack.is_tree(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if not known:
        raise _unknown(path)
    return read_native(path)


def _has(directory: epath.Path, *names: str) -> bool:
    return any((directory / name).exists() for name in names)


def _unknown(path: epath.Path) -> UserError:
    hint = " If it belongs to a checkpoint, give the directory." if path.is_file() else ""
    return UserError(
        f"{path} is no checkpoint that is known here: not ours (MANIFEST.json), native T5X (a file `checkpoint`), "
        f"T5X's Orbax (_METADATA), Mesh TensorFlow (*.index) or Hugging Face (config.json).{hint}"
    )
