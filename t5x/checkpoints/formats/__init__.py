"""Every checkpoint a T5 user has: which format a path is, and opening it.

Readers are imported when a checkpoint of their format is met.
"""

import os

from etils import epath

from t5x.checkpoints import paths, remote
from t5x.checkpoints.formats.base import LazyArray, Source
from t5x.errors import UserError

__all__ = ["LazyArray", "Source", "open_checkpoint"]


def open_checkpoint(path: epath.PathLike) -> Source:
    """Opens a checkpoint of any format; nothing but its index is read.

    Args:
      path: ours, native T5X's or T5X's Orbax's (a `checkpoint_<step>` directory, or the MODEL_DIR above, of which the
        newest is taken), Mesh TensorFlow's (`model.ckpt-N`, its `.index`, or the directory), or a Hugging Face
        directory. A remote one (`gs://…`) is copied to the cache directory first.
    """
    from t5x.checkpoints import reading

    path = remote.stage(path)
    there = lambda *names: any((path / name).exists() for name in names)
    if path.suffix == ".index" or epath.Path(f"{path}.index").exists():
        from t5x.checkpoints.formats.mesh_tensorflow import read_mesh_tensorflow

        return read_mesh_tensorflow(path)
    if path.is_file():
        from t5x.checkpoints.formats.native import read_native

        return read_native(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint {path}: no such file or directory.")
    if there(paths.MANIFEST):
        from t5x.checkpoints.formats.ours import read_ours

        return read_ours(reading.resolve_verified(path))
    if there("config.json"):
        from t5x.checkpoints.formats.huggingface import read_huggingface

        return read_huggingface(path)
    if there("_METADATA", "manifest.ocdbt", "state/_METADATA"):
        from t5x.checkpoints.formats.orbax import read_orbax

        return read_orbax(path)
    if steps := reading.list_steps(path):
        newest = path / paths.checkpoint_name(steps[-1])
        return open_checkpoint(reading.resolve(path) if (newest / paths.MANIFEST).exists() else newest)
    if any(name.endswith(".index") for name in os.listdir(path)):
        from t5x.checkpoints.formats.mesh_tensorflow import read_mesh_tensorflow

        return read_mesh_tensorflow(path)
    if there("checkpoint"):
        if b"PLACEHOLDER://" in (path / "checkpoint").read_bytes()[:1_000_000]:  # an early version of Orbax
            from t5x.checkpoints.formats.orbax import read_orbax

            return read_orbax(path)
        from t5x.checkpoints.formats.native import read_native

        return read_native(path)
    raise UserError(
        f"{path} is no checkpoint that is known here: not ours (MANIFEST.json), native T5X (a file `checkpoint`), "
        "T5X's Orbax (_METADATA), Mesh TensorFlow (*.index) or Hugging Face (config.json)."
    )
