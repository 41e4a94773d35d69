"""The common form of all checkpoint formats: lazily read arrays under T5X's names."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.manifest import DamagedCheckpoint

# Arrays are larger than their files due to compression, and to omitted chunks that equal the fill value: float32 arrays
# of bfloat16 values by a factor of 2.3, and a fresh Adam state, all zeros, by another 3.
_MAX_EXPANSION = 8
_ALWAYS_ALLOWED_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of a checkpoint that is read on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the array, for `np.asarray(array)`."""
        return np.asarray(self.read(), dtype)


def check_expansion(path: epath.PathLike, arrays: Iterable[Any], file_bytes: int) -> None:
    """Raise DamagedCheckpoint if arrays are far larger than the files that hold them.

    A few kilobytes of metadata can claim any number of gigabytes. This bounds what reading them allocates.

    Args:
      arrays: all arrays of a checkpoint: anything with `shape` and `dtype`.
      file_bytes: total size of the files that store them.
    """
    claimed = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    if claimed > _MAX_EXPANSION * file_bytes + _ALWAYS_ALLOWED_BYTES:
        raise DamagedCheckpoint(
            path,
            f"its metadata claims arrays of {paths.human_size(claimed)}, which its files of "
            f"{paths.human_size(file_bytes)} cannot hold",
        )


def check_chunk_shape(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> None:
    """Raise ValueError if a chunk, which is decoded in one piece, is far larger than its array."""
    if math.prod(chunk) * itemsize > math.prod(shape) * itemsize + _ALWAYS_ALLOWED_BYTES:
        raise ValueError(f"its chunks {list(chunk)} are larger than itself, {list(shape)}")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint opened for reading.

    Attributes:
      format: readable name of the format: `native T5X (version 3)`.
      path: path of the checkpoint.
      step: the training step; None if the format has none.
      arrays: {T5X's name: array}, scanned or unrolled as stored: `target/encoder/layers_0/…/kernel`,
        `state/param_states/encoder/…/kernel/v_row`.
      config: fields of the network's configuration (T5Config) that the checkpoint states; None if it states none.
      vocabulary_files: {feature: {file name: content}} of the included vocabularies.
      inputs_bidirectional_attention: whether a decoder-only model is a prefix LM.
      template: fields of a ranker's template as stored, if there is one; `t5x.ranking` reads them.
      model_type: `t5`, `mt5` or `umt5`, if the checkpoint states it, as Hugging Face's do.
    """

    format: str
    path: str
    step: int | None
    arrays: Mapping[str, LazyArray]
    config: Mapping[str, Any] | None = None
    vocabulary_files: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    inputs_bidirectional_attention: bool = False
    template: Mapping[str, Any] | None = None
    model_type: str | None = None
