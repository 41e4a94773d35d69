"""Writes a checkpoint array by array, for trees that need not fit in memory. Conversion uses it.

The format is that of `CheckpointStore.save`, which needs the whole tree at once.
"""

import itertools
import os
from collections.abc import Iterable, Mapping

import numpy as np
import tensorstore as ts
from etils import epath

from t5x.checkpoints import arrays, faults, manifest, paths
from t5x.checkpoints.formats.zarr_arrays import choose_chunks
from t5x.checkpoints.tree import as_struct
from t5x.errors import UserError
from t5x.files import atomic

_BATCH_BYTES = 64 * 2**20


def write_checkpoint(
    path: epath.PathLike, step: int, tensors: Iterable[tuple[str, np.ndarray]], *, sidecars: Mapping[str, bytes]
) -> None:
    """Write the complete directory `path`, or nothing.

    Args:
      path: a checkpoint directory that does not exist yet. If its name is checkpoint_<number>, that must be the step.
      step: the training step.
      tensors: (name, array), one at a time: `target/…` and optionally `state/param_states/…`.
      sidecars: {name: content} of the files beside the arrays.
    """
    final = paths.local_path(path)
    check_name(final, step)
    if os.path.lexists(final):
        raise UserError(f"{final} exists already; choose another destination.")
    try:
        with atomic.new_directory(final) as temporary:
            state = epath.Path(temporary) / paths.STATE
            state.mkdir()
            _write_arrays(state, step, tensors)
            for name, content in sidecars.items():
                paths.write_file(os.path.join(temporary, name), content)
            manifest.write(temporary, step)
    except (OSError, ValueError) as error:
        if faults.errno_of(error) is None:
            raise
        raise UserError(
            f"{final} could not be written: {faults.first_line(error)}. What was written of it has been removed. "
            "See that the disk has space and that you may write there, or choose another place."
        ) from error


def check_name(path: epath.Path, step: int) -> None:
    """Raise a UserError if the name has another step: nothing would read that checkpoint."""
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
    # Commit small arrays in batches: each commit is slow and leaves an old version of the index behind.
    shapes, batch, pending = {}, ts.Transaction(), 0
    for name, array in itertools.chain(tensors, [("state/step", np.asarray(step, np.int32))]):
        shapes[name] = as_struct(array)
        if not array.size:
            continue
        spec = arrays.array_spec(base, name, choose_chunks(array.shape, array.dtype.itemsize), array)
        if array.nbytes < _BATCH_BYTES:
            ts.open(spec, create=True, context=context, transaction=batch).result().write(array).copy.result()
            pending += array.nbytes
        else:
            ts.open(spec, create=True, context=context).result().write(array).result()
        if pending >= _BATCH_BYTES:
            batch.commit_async().result()
            batch, pending = ts.Transaction(), 0
        del array  # before the next one is read
    batch.commit_async().result()
    arrays.write_metadata(directory, shapes)
    missing = set(shapes) - set(arrays.read_shapes(directory))
    if missing:
        raise UserError(f"{directory}: {min(missing)} was written but cannot be found again. Is the disk sound?")
