"""Detects the format of a checkpoint and opens it.

Readers are imported only when a checkpoint of their format is opened.
"""

import logging
import os

from etils import epath

from t5x._runtime.errors import ArgumentError, UserError
from t5x.checkpoints import manifest, names, paths, remote_reading
from t5x.checkpoints.formats.safety import check_links
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.checkpoints.remote_reading import HUGGINGFACE, NATIVE, ORBAX
from t5x.files.remote import is_remote
from t5x.files.untrusted import open_inside, open_regular

__all__ = ["LazyArray", "Source", "is_own_checkpoint", "open_checkpoint"]

log = logging.getLogger(__name__)

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ORBAX = (*ORBAX, f"{paths.STATE}/_METADATA")


def open_checkpoint(path: epath.PathLike, *, verify: bool = True) -> Source:
    """Open a checkpoint of any format. Only its index is read.

    Args:
      path: a checkpoint of ours, native T5X or T5X's Orbax (a `checkpoint_<step>` directory, or the MODEL_DIR above, of
        which the newest that can be opened is used), Mesh TensorFlow (`model.ckpt-N`, its `.index`, or the directory),
        or a Hugging Face directory; or any other name that `names` lists. A remote one is copied to a cache directory.
      verify: check the files of our checkpoints against their manifest. Pass False if that has just been done.
    """
    requested, path = os.fspath(path), remote_reading.stage(path)
    if not _has(path, paths.MANIFEST, HUGGINGFACE, *_ORBAX) and (steps := paths.list_steps(path)):
        return _open_newest(path, steps, verify)
    source = _open(path, verify)
    chosen = is_remote(requested) and paths.step_of(path) is not None and paths.step_of(requested.rstrip("/")) is None
    if chosen and (problem := _misnamed(path, source)):
        raise UserError(
            f"{requested}: {path.name} is the newest by its name, but {problem}. Give the URL of the checkpoint itself."
        )
    return source


def is_own_checkpoint(directory: epath.Path) -> bool:
    """Return whether the content of a directory is a checkpoint of a format that we write; it may be damaged."""
    from t5x.checkpoints.formats import lazy_msgpack

    try:
        if os.path.isfile(directory / paths.MANIFEST):
            with open_inside(directory, paths.MANIFEST) as file:
                return b'"format": "t5x"' in file.read(200)
        if os.path.isfile(directory / NATIVE):
            return lazy_msgpack.is_tree(directory / NATIVE)
    except OSError:
        return False
    return _has(directory, HUGGINGFACE) and _has(directory, *_WEIGHTS)


def _open_newest(directory: epath.Path, steps: list[int], verify: bool) -> Source:
    """Return the newest checkpoint of a MODEL_DIR that can be opened and whose content has the step in its name.

    Logs which one is used and which are skipped. One without a step in its content is used only if there is no other.
    """
    skipped = []
    without_step = None
    for step in reversed(steps):
        path = directory / paths.checkpoint_name(step)
        try:
            check_links(str(directory), [path.name], [os.path.realpath(directory)])
            source = _open(path, verify)
            reason = _misnamed(path, source)
            if reason is None:
                log.info("%s: using its newest complete checkpoint, %s", directory, path.name)
                return source
            if source.step is None:
                without_step = without_step or source
        except UserError as error:
            if not path.exists():  # a trainer's retention has just removed it
                continue
            reason = error.reason if isinstance(error, DamagedCheckpoint) else str(error)
        skipped.append(f"  {path.name}: {reason}")
        log.warning("Skipping %s: %s", path, reason)
    if without_step is not None:
        log.warning("%s: using %s, as there is no other", directory, os.path.basename(without_step.path))
        return without_step
    reasons = "\n".join(skipped)
    raise UserError(
        f"{directory} is not a checkpoint, and none of the checkpoints in it can be used:\n{reasons}\n"
        "Give another checkpoint or MODEL_DIR."
    )


def _misnamed(path: epath.Path, source: Source) -> str | None:
    """Return why a `checkpoint_<step>` may not be of that step, or None if it is."""
    if source.step is None:
        return f"its content ({source.format}) has no step, so it may be older than its name suggests"
    return None if source.step == paths.step_of(path) else paths.renamed(source.step)


def _open(path: epath.Path, verify: bool) -> Source:
    if _is_mesh_tensorflow(path):
        from t5x.checkpoints.formats.mesh_tensorflow import read_mesh_tensorflow

        return read_mesh_tensorflow(path)
    if path.is_file():
        return _open_msgpack_file(path)
    if not path.is_dir():
        raise UserError(
            f"There is no checkpoint at {path}: no such file or directory.{names.suggestion(str(path))} A model of the "
            "Hugging Face Hub is named owner/name or hf://owner/name."
        )
    if _has(path, paths.MANIFEST):
        from t5x.checkpoints.formats.own_checkpoint import read_own_checkpoint

        if verify:
            manifest.verify(path)
        return read_own_checkpoint(path)
    if _has(path, HUGGINGFACE):
        from t5x.checkpoints.formats.huggingface import read_huggingface

        return read_huggingface(path)
    if _has(path, *_ORBAX):
        from t5x.checkpoints.formats.orbax import read_orbax

        return read_orbax(path)
    if _has(path, NATIVE):
        from t5x.checkpoints.formats.native_t5x import read_native
        from t5x.checkpoints.formats.orbax import read_orbax

        return read_orbax(path) if _is_early_orbax(path) else read_native(path)
    raise _unknown(path)


def _is_mesh_tensorflow(path: epath.Path) -> bool:
    if path.suffix == ".index" or epath.Path(f"{path}.index").exists():
        return True
    has_index = path.is_dir() and any(name.endswith(".index") for name in os.listdir(path))
    return has_index and not _has(path, paths.MANIFEST, HUGGINGFACE, *_ORBAX)


def _is_early_orbax(directory: epath.Path) -> bool:
    try:
        with open_inside(directory, NATIVE) as file:
            return b"PLACEHOLDER://" in file.read(1_000_000)
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{NATIVE} cannot be read: {error.strerror}") from error


def _open_msgpack_file(path: epath.Path) -> Source:
    """Open the msgpack file of a native checkpoint, the only format with a single file."""
    from t5x.checkpoints.formats import lazy_msgpack
    from t5x.checkpoints.formats.native_t5x import TENSORFLOW_STATE, read_native

    try:
        with open_regular(path) as file:
            is_tensorflow = file.read(len(TENSORFLOW_STATE)) == TENSORFLOW_STATE
        if not is_tensorflow and not lazy_msgpack.is_tree(path):
            raise _unknown(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return read_native(path)


def _has(directory: epath.Path, *names: str) -> bool:
    return any((directory / name).exists() for name in names)


def _unknown(path: epath.Path) -> ArgumentError:
    hint = " If it belongs to a checkpoint, give the directory." if path.is_file() else ""
    return ArgumentError(
        f"{path} is not a checkpoint of a supported format: ours (MANIFEST.json), native T5X (a file `checkpoint`), "
        f"T5X's Orbax (_METADATA), Mesh TensorFlow (*.index) or Hugging Face (config.json).{hint}"
    )
