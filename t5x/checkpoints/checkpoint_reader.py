"""Reading checkpoints from a path alone, whoever wrote them and on whatever devices."""

import glob
import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import array_reader, manifest, paths
from t5x.checkpoints import tree as trees
from t5x.checkpoints.formats.source import Source
from t5x.files.untrusted import open_inside
from t5x.partitioning.consistency import sampled_digest

_logger = logging.getLogger(__name__)


def restore(path: epath.PathLike, abstract_tree: Any = None, *, verify: bool = True) -> Any:
    """Read the tree of a checkpoint, or a part of it.

    Args:
      path: the checkpoint directory.
      abstract_tree: the tree to return, with jax.ShapeDtypeStruct leaves. A leaf with a sharding is read directly onto
        its devices, on any mesh; one without becomes a NumPy array. A dtype other than the stored one casts. Of the
        sections `target`, `state/step`, `state/param_states` and `flax_mutables`, those that the tree omits are not
        read (`{"target": …}` for inference); within a section, the arrays must match exactly. None reads everything,
        as nested dictionaries of NumPy arrays.
      verify: check all files against the manifest while reading. Pass False if that has just been done.

    Raises:
      DamagedCheckpoint: a file has changed since it was written.
      UserError: the tree does not fit; the message has a table of the differences.
    """
    if not verify:
        return _read(path, abstract_tree)
    verification = manifest.Verification(path)
    try:
        return _read(path, abstract_tree)
    finally:
        verification.finish()  # damage replaces any error above, which it may have caused


def _read(path: epath.PathLike, abstract_tree: Any) -> Any:
    stored = array_reader.StoredArrays(_state_directory(path))
    if abstract_tree is None:
        return trees.nest(stored.read(stored.shapes))

    requested = {name: trees.as_struct(leaf) for name, leaf in trees.flatten(abstract_tree).items()}
    sections = {trees.section(name) for name in requested}
    relevant = {name: leaf for name, leaf in stored.shapes.items() if trees.section(name) in sections}
    if table := trees.difference_by_name(requested, relevant):
        raise UserError(f"{path} does not fit the model (expected: the model, found: the checkpoint): {table}")
    _log_casts(path, requested, stored.shapes)
    leaves = stored.read(requested)
    return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves.values())


def read_shapes(path: epath.PathLike) -> dict[str, Any]:
    """Return the tree of a checkpoint with jax.ShapeDtypeStruct leaves: `restore(path)` without the data."""
    return trees.nest(array_reader.read_shapes(_state_directory(path)))


def read_names(path: epath.PathLike) -> set[str]:
    """Return the names of all arrays of a checkpoint."""
    return array_reader.read_names(_state_directory(path))


def _state_directory(path: epath.PathLike) -> str:
    """Return the directory of the arrays, after checking that the manifest is one of ours."""
    manifest.read(path)
    return f"{paths.location(path)}/{paths.STATE}"


def _log_casts(path: epath.PathLike, requested: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    casts = sorted({(shapes[name].dtype.name, leaf.dtype.name) for name, leaf in requested.items()})
    for stored, asked in casts:
        if stored != asked:
            _logger.info("%s: casting %s arrays to %s", path, stored, asked)


_HUGGINGFACE = ("config.json", ".safetensors")  # suffixes of the files that are read; others may change


def fingerprint(source: Source, *, content: bool = False) -> str:
    """Return a hash that changes if another checkpoint replaces this one.

    For our checkpoints, it is based on the manifest, which has a hash of every file; for others, on the names, sizes
    and times of their files. Vocabularies are hashed by content.

    Args:
      content: use samples of the files' content instead of their times, to compare copies on several machines.
    """
    directory = os.path.dirname(source.path) if os.path.isfile(source.path) else source.path
    if os.path.isfile(os.path.join(directory, paths.MANIFEST)):
        with open_inside(directory, paths.MANIFEST) as file:
            files: str | list[tuple[str, int, str | int]] = hashlib.sha256(file.read()).hexdigest()
    else:
        root = directory if os.path.isdir(directory) else os.path.dirname(directory)
        files = [
            (name, status.st_size, _sampled(os.path.join(root, name), status) if content else status.st_mtime_ns)
            for name, status in _files(source, directory)
        ]
    vocabularies = {
        feature: {name: hashlib.sha256(content).hexdigest() for name, content in sorted(of_feature.items())}
        for feature, of_feature in sorted(source.vocabulary_files.items())
    }
    return hashlib.sha256(json.dumps([files, vocabularies]).encode()).hexdigest()[:16]


def _sampled(path: str, status: os.stat_result) -> str:
    return sampled_digest(path, blocks=16, block=1 << 12) if stat.S_ISREG(status.st_mode) else ""


def _files(source: Source, directory: str) -> list[tuple[str, os.stat_result]]:
    if not os.path.isdir(directory):  # the prefix of a TensorFlow checkpoint
        return [(os.path.basename(path), os.stat(path)) for path in sorted(glob.glob(f"{glob.escape(directory)}.*"))]
    if source.format.startswith("Hugging Face"):
        names = sorted(name for name in os.listdir(directory) if name.endswith(_HUGGINGFACE))
        return [(name, os.stat(os.path.join(directory, name))) for name in names]  # follows links
    return sorted(paths.walk(directory))
