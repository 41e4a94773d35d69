"""T5X's native checkpoints, version 3: the format of all published T5X models.

    checkpoint_<step>/
      checkpoint                msgpack: {"version": 3, "optimizer": {"target": …, "state": {"step", "param_states"}}};
                                a leaf is an array, or a TensorStore spec that names a directory beside this file
      target.a.b.kernel/        a zarr array: .zarray and gzip-compressed chunks
      state.param_states.…/     the same for large optimizer state
      checkpoint.sha256         written by us in the format of `sha256sum`, verified if it exists; T5X ignores it

The gzip chunks have checksums, the msgpack file does not; hence the last file.
"""

from t5x.checkpoints.formats.native_read import read_native
from t5x.checkpoints.formats.native_write import write_native

__all__ = ["read_native", "write_native"]
