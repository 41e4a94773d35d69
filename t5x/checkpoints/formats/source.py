"""`Source`, the common form of all checkpoint formats: lazily read arrays under T5X's names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of a checkpoint that is read on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> "LazyArray":
        return LazyArray(self.shape[::-1], self.dtype, lambda: self.read().T)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the array, for `np.asarray(array)`."""
        return np.asarray(self.read(), dtype)


KEPT_FILES = ("generation_config.json", "tokenizer.json")  # the latter if there is a SentencePiece model beside it


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
      data: how the run that wrote it read its data file, as stored; `t5x.data.data_description` reads it.
      model_type: `t5`, `mt5` or `umt5`, if the checkpoint states it, as Hugging Face's do.
      huggingface_files: {name: content} of the `KEPT_FILES` of a Hugging Face directory, for conversion back to one.
    """

    format: str
    path: str
    step: int | None
    arrays: Mapping[str, LazyArray]
    config: Mapping[str, Any] | None = None
    vocabulary_files: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    inputs_bidirectional_attention: bool = False
    template: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    model_type: str | None = None
    huggingface_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
