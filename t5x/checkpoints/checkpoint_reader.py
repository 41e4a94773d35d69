"""Reading checkpoints from a path alone, whoever wrote them and on whatever devices."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from t5x.checkpoints import array_reader, manifest, paths, remote_reading
from t5x.checkpoints import tree as trees
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError

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
      verify: check all files against the manifest while reading. Pass False if that has just been done (latest_whole).

    Raises:
      DamagedCheckpoint: a file has changed since it was written.
      UserError: the tree does not fit; the message has a table of the differences.
    """
    path = paths.local_path(path)
    if not verify:
        return _read(path, abstract_tree)
    verification = manifest.Verification(path)
    try:
        return _read(path, abstract_tree)
    finally:
        verification.finish()  # damage replaces any error above, which it may have caused


def _read(path: epath.Path, abstract_tree: Any) -> Any:
    stored = array_reader.StoredArrays(_state_directory(path))
    if abstract_tree is None:
        return trees.nest(stored.read(stored.shapes))

    wanted = {name: trees.as_struct(leaf) for name, leaf in trees.flatten(abstract_tree).items()}
    sections = {_section(name) for name in wanted}
    relevant = {name: leaf for name, leaf in stored.shapes.items() if _section(name) in sections}
    if table := trees.difference_by_name(wanted, relevant):
        raise UserError(f"{path} does not fit the model (expected: the model, found: the checkpoint): {table}")
    _log_casts(path, wanted, stored.shapes)
    leaves = stored.read(wanted)
    return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves.values())


def read_shapes(path: epath.PathLike) -> dict[str, Any]:
    """Return the tree of a checkpoint with jax.ShapeDtypeStruct leaves: `restore(path)` without the data."""
    return trees.nest(array_reader.read_shapes(_state_directory(paths.local_path(path))))


def read_names(path: epath.PathLike) -> set[str]:
    """Return the names of all arrays of a checkpoint."""
    return array_reader.read_names(_state_directory(paths.local_path(path)))


def read_sidecar(path: epath.PathLike, relative: str) -> bytes:
    """Return the content of a file beside the arrays, such as `model.json`, checked against the manifest."""
    return manifest.read_file(path, relative)


def list_steps(directory: epath.PathLike) -> list[int]:
    """Return the steps of the finished checkpoints in MODEL_DIR, ascending; empty if it does not exist."""
    directory = paths.local_path(directory)
    if not directory.is_dir():
        return []
    steps = (paths.step_of(entry) for entry in directory.iterdir() if entry.is_dir())
    return sorted(step for step in steps if step is not None)


def find_latest_whole(directory: epath.PathLike) -> tuple[epath.Path | None, list[tuple[epath.Path, str]]]:
    """Find the newest checkpoint in MODEL_DIR that verifies.

    Returns:
      its path (None if there is none), and (path, reason) of each damaged checkpoint skipped, newest first.
    """
    directory = paths.local_path(directory)
    damaged = []
    for step in reversed(list_steps(directory)):
        path = directory / paths.checkpoint_name(step)
        reason = damage(path, functools.partial(manifest.verify, path))
        if reason is None:
            return path, damaged
        if reason:
            damaged.append((path, reason))
    return None, damaged


def damage(path: epath.Path, verify: Callable[[], object]) -> str | None:
    """Run `verify`; log and return the damage, or None.

    Returns "" if the checkpoint no longer exists, because a trainer's retention has just removed it.
    """
    try:
        verify()
    except DamagedCheckpoint as error:
        if not path.exists():
            return ""
        _logger.warning("Passing over %s: %s", path, error.reason)
        return error.reason
    return None


def resolve(path: epath.PathLike) -> epath.Path:
    """Return the checkpoint that `path` refers to: a checkpoint directory, or the newest complete one of a MODEL_DIR.

    Logs which one is used and which are skipped. A remote checkpoint is copied to the cache directory.
    """
    path = remote_reading.stage(path)
    if not path.is_dir():
        raise UserError(f"There is no directory {path}. Give a checkpoint_<step> directory, or the MODEL_DIR of a run.")
    if (path / paths.MANIFEST).exists() or paths.step_of(path) is not None:
        return path
    newest, damaged = find_latest_whole(path)
    if newest is None:
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in damaged)
        detail = f"none of its checkpoints is whole ({reasons})" if damaged else "it has no checkpoint_<step> directory"
        raise UserError(f"{path} is neither a checkpoint nor a MODEL_DIR to take one from: {detail}.")
    _logger.info("%s: taking its newest whole checkpoint, %s", path, newest.name)
    return newest


def resolve_verified(path: epath.PathLike) -> epath.Path:
    """Return `resolve(path)`, verified once: restore it with verify=False."""
    path = remote_reading.stage(path)
    resolved = resolve(path)
    if resolved == path:  # otherwise it was verified when it was chosen
        manifest.verify(resolved)
    return resolved


def _state_directory(path: epath.Path) -> epath.Path:
    """Return the directory of the arrays, after checking that the manifest is one of ours."""
    manifest.read(path)
    return path / paths.STATE


def _section(name: str) -> str:
    return "/".join(name.split("/")[: 2 if name.startswith("state/") else 1])


def _log_casts(path: epath.Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    casts = sorted({(found[name].dtype.name, leaf.dtype.name) for name, leaf in wanted.items()})
    for stored, asked in casts:
        if stored != asked:
            _logger.info("%s: %s arrays are cast to %s, as asked", path, stored, asked)
