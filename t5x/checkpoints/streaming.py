"""Writes a checkpoint array by array, for trees that need not fit in memory. Conversion uses it.

The format is that of `CheckpointStore.save`, which needs the whole tree at once.
"""

import itertools
import os
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from t5x.checkpoints import array_writer, manifest, paths
from t5x.errors import UserError
from t5x.files import atomic
from t5x.files.system_errors import errno_of, first_line


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
            array_writer.write_one_by_one(
                state, itertools.chain(tensors, [("state/step", np.asarray(step, np.int32))])
            )
            for name, content in sidecars.items():
                paths.write_file(os.path.join(temporary, name), content)
            manifest.write(temporary, step)
    except (OSError, ValueError) as error:
        if errno_of(error) is None:
            raise
        raise UserError(
            f"{final} could not be written: {first_line(error)}. The unfinished directory has been removed. Check that "
            "the disk has space and that you may write there, or choose another place."
        ) from error


def check_name(path: epath.Path, step: int) -> None:
    """Raise a UserError if the name has another step: nothing would read that checkpoint."""
    if paths.step_of(path) not in (None, step):
        right = path.parent / paths.checkpoint_name(step)
        raise UserError(
            f"{path} cannot be written: the number in such a name is the step, and the step is {step}. Name it "
            f"{right}, or anything that is not checkpoint_<number>."
        )
