"""Writing a checkpoint array by array, for trees that need not fit in memory: what conversion uses.

The result is what `CheckpointStore.save` writes. Orbax itself wants the whole tree at once.
"""

import itertools
import json
import os
import secrets
from collections.abc import Iterable, Mapping

import numpy as np
import tensorstore as ts
from etils import epath

from t5x.checkpoints import arrays, faults, manifest, paths
from t5x.checkpoints.formats.zarr_arrays import choose_chunks
from t5x.errors import UserError

_BATCH_BYTES = 64 * 2**20


def write_checkpoint(
    path: epath.PathLike, step: int, tensors: Iterable[tuple[str, np.ndarray]], *, sidecars: Mapping[str, bytes]
) -> None:
    """Writes the directory `path` whole, or not at all.

    Args:
      path: a checkpoint directory that does not exist yet; if it is called checkpoint_<step>, of this step.
      step: of training.
      tensors: (name, array), one at a time; `target/…` and, if there is one, `state/param_states/…`.
      sidecars: contents of the files beside the arrays.
    """
    final = paths.local_path(path)
    check_name(final, step)
    if os.path.lexists(final):
        raise UserError(f"{final} exists already; choose another destination.")
    temporary = final.parent / f"{final.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        state = temporary / paths.STATE
        os.makedirs(state)
        _write_arrays(state, step, tensors)
        for name, content in sidecars.items():
            paths.write_file(temporary / name, content)
        paths.fsync_tree(temporary)
        manifest.write(temporary, step)
        os.rename(temporary, final)
        paths.fsync(final.parent)
    except (OSError, ValueError) as error:
        if faults.errno_of(error) is None:
            raise
        raise UserError(
            f"{final} could not be written: {faults.first_line(error)}. What was written of it has been removed. "
            "See that the disk has space and that you may write there, or choose another place."
        ) from error
    finally:
        paths.remove_tree(temporary)


def check_name(path: epath.Path, step: int) -> None:
    """UserError where the name says another step: nothing would read that checkpoint."""
    if paths.step_of(path) not in (None, step):
        right = path.parent / paths.checkpoint_name(step)
        raise UserError(
            f"{path} cannot be written: the number in such a name is the step, and the step is {step}. Call it "
            f"{right}, or anything that is not checkpoint_<number>."
        )


def _write_arrays(directory: epath.Path, step: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}
    base["config"] = {"max_inline_value_bytes": 1024}
    context = ts.Context()
    # A version of the database for every small array would be slow, and leave its tree behind as often.
    names, batch, pending = [], ts.Transaction(), 0
    for name, array in itertools.chain(tensors, [("state/step", np.asarray(step, np.int32))]):
        metadata = {
            "shape": list(array.shape),
            "chunks": list(choose_chunks(array.shape, array.dtype.itemsize)),
            "compressor": None,
        }
        spec = {"driver": "zarr", "kvstore": {**base, "path": name.replace("/", ".") + "/"}, "metadata": metadata}
        options = {"dtype": ts.dtype(array.dtype), "create": True, "open": False, "context": context}
        if array.nbytes < _BATCH_BYTES:
            ts.open(spec, transaction=batch, **options).result().write(array).copy.result()
            pending += array.nbytes
        else:
            ts.open(spec, **options).result().write(array).result()
        if pending >= _BATCH_BYTES:
            batch.commit_async().result()
            batch, pending = ts.Transaction(), 0
        names.append(name)
        del array  # before the next one is made
    batch.commit_async().result()
    paths.write_file(directory / "_METADATA", json.dumps(_tree_metadata(names)).encode())
    missing = set(names) - set(arrays.read_shapes(directory))
    if missing:
        raise UserError(f"{directory}: {min(missing)} was written but cannot be found again. Is the disk sound?")


def _tree_metadata(names: Iterable[str]) -> dict:
    """The file by which Orbax knows what is there."""
    tree = {}
    for name in names:
        keys = tuple(name.split("/"))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {arrays.EMPTY: {}},
    }
