"""The arrays of a checkpoint: the directory `state/`, written and read by Orbax. Nothing else here knows Orbax.

Arrays are stored with OCDBT, uncompressed (trained weights do not compress, and both directions run at the speed of
the disk), in chunks small enough that any other sharding can read just its part. Orbax refuses arrays without elements:
their shapes and dtypes are kept in the metadata of the same directory.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from t5x.checkpoints import faults, paths
from t5x.checkpoints import tree as trees
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError

_CHUNK_BYTES = 64 * 2**20
_FILE_BYTES = 256 * 2**20  # files are hashed in parallel, so a few of them are better than one
_INLINE_BYTES = 1024  # up to this size Orbax lets chunks lie inside OCDBT's own, compressed, nodes
EMPTY = "empty_arrays"


class _OrbaxNoise(logging.Filter):
    """Drops what Orbax logs below warnings, and the tracebacks of errors that it hands to us as exceptions anyway."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":
            return "/orbax/checkpoint/" not in record.getMessage()
        foreign = "/orbax/checkpoint/" not in record.pathname
        return foreign or (record.levelno >= logging.WARNING and not record.exc_info)


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_OrbaxNoise())


def _handler() -> ocp.PyTreeCheckpointHandler:
    array_handler = ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False, use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, array_handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False, type_handler_registry=registry)


class PendingWrite:
    """Arrays on their way to a directory. Once constructed, they are on the host: the device buffers may be donated.

    Args:
      directory: does not exist yet; Orbax fills a directory beside it and renames that.
      tree: nested dictionaries of jax.Array, NumPy arrays and plain numbers.
    """

    def __init__(self, directory: epath.Path, tree: Any):
        leaves = {name: _as_array(name, leaf) for name, leaf in trees.flatten(tree).items()}
        _check_stored_names(leaves)
        stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
        if not stored:
            raise UserError("A checkpoint needs at least one array with elements; the tree has none.")
        self._directory = directory
        self._shapes = {name: trees.as_struct(leaf) for name, leaf in leaves.items()}
        item = trees.nest(stored)
        save = ocp.args.PyTreeSave(
            item,
            save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), item),
            ocdbt_target_data_file_size=_FILE_BYTES,
            custom_metadata={
                EMPTY: {
                    name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name}
                    for name, leaf in leaves.items()
                    if not leaf.size
                }
            },
        )
        self._checkpointer = ocp.AsyncCheckpointer(_handler())
        self._checkpointer.save(directory, args=save)

    def wait(self) -> None:
        """Returns when the arrays are in the directory, and forgets them; raises what Orbax or the system raised."""
        checkpointer, self._checkpointer = self._checkpointer, None
        try:
            checkpointer.wait_until_finished()
            self._check_nothing_vanished()
        except (ValueError, DamagedCheckpoint) as error:
            if isinstance(error, ValueError) and faults.errno_of(error) is not None:
                raise
            raise UserError(
                f"Files vanished from {self._directory} while it was being written ({faults.first_line(error)}). "
                "See what removes files there, and start again."
            ) from error
        finally:
            checkpointer.close()

    def _check_nothing_vanished(self) -> None:
        """TensorStore makes missing directories anew, so the removal of some half-way can go unnoticed."""
        found = read_shapes(self._directory)
        if missing := self._shapes.keys() - found.keys():
            raise ValueError(f"{min(missing)} is not there")
        if paths.tree_size(self._directory) < sum(map(_bytes_in_files, self._shapes.values())):
            raise ValueError("the files are too small for the arrays")


def read_shapes(directory: epath.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array in the directory, by name. Reads metadata only."""
    try:
        metadata = _handler().metadata(directory)
        empty = (metadata.custom_metadata or {}).get(EMPTY, {})
        shapes = {name: trees.as_struct(leaf) for name, leaf in trees.flatten(metadata.tree).items()}
        for name, leaf in empty.items():
            shapes[name] = jax.ShapeDtypeStruct(tuple(leaf["shape"]), jax.numpy.dtype(leaf["dtype"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(directory, f"its metadata cannot be read: {faults.first_line(error)}") from error
    return shapes


def read(directory: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Reads the wanted arrays, and only these.

    Args:
      directory: as PendingWrite left it.
      wanted: by name, with the shape stored (see read_shapes). An array with a sharding arrives on its devices, shard
        by shard; one without arrives as a NumPy array. A dtype other than the stored one casts.
    """
    result = {name: _empty_array(leaf) for name, leaf in wanted.items() if 0 in leaf.shape}
    stored = {name: leaf for name, leaf in wanted.items() if 0 not in leaf.shape}
    if stored:
        item = trees.nest(stored)
        restore = ocp.args.PyTreeRestore(item, restore_args=jax.tree.map(_restore_args, item), partial_restore=True)
        try:
            with ocp.Checkpointer(_handler()) as checkpointer:
                arrays = trees.flatten(checkpointer.restore(directory, args=restore))
        except ValueError as error:
            if not faults.tensorstore_status(error):
                raise
            raise DamagedCheckpoint(directory, faults.first_line(error)) from error
        result |= arrays
    return {name: result[name] for name in wanted}


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )


def _empty_array(leaf: jax.ShapeDtypeStruct) -> Any:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return zeros if leaf.sharding is None else jax.device_put(zeros, leaf.sharding)


def _as_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    if isinstance(leaf, bool | int | float | np.generic):
        leaf = np.asarray(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise UserError(
            f"{name}: a {type(leaf).__name__} of dtype {getattr(leaf, 'dtype', None)} cannot be saved in a checkpoint. "
            "Save arrays of numbers (of a random key: jax.random.key_data)."
        )
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUSMm":
        raise UserError(f"{name}: an array of dtype {leaf.dtype} cannot be saved in a checkpoint; save numbers.")
    return leaf


def _check_stored_names(leaves: Mapping[str, Any]) -> None:
    """Orbax joins keys with dots, so `a.b` beside `a/b` would overwrite each other."""
    seen: dict[str, str] = {}
    for name in leaves:
        other = seen.setdefault(name.replace("/", "."), name)
        if other != name:
            raise UserError(f"Parameters {other!r} and {name!r} cannot both be saved. Rename one of them.")


def _bytes_in_files(leaf: jax.ShapeDtypeStruct) -> int:
    """How many bytes this array adds to the files at least."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    shards = len(leaf.sharding.device_set) if leaf.sharding is not None else 1
    return size if size > _INLINE_BYTES * shards else 0
