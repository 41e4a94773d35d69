"""What every checkpoint format is read into: arrays by T5X's names, none of them read yet."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5x.ranking.templates import Template


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of a checkpoint that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`np.asarray(array)` reads it."""
        return np.asarray(self.read(), dtype)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint opened for reading.

    Attributes:
      format: what it is, for people: `native T5X (version 3)`.
      path: where.
      step: of training; None where the format has none.
      arrays: by T5X's names, as the checkpoint has them (scanned or unrolled): `target/encoder/layers_0/…/kernel`,
        `state/param_states/encoder/…/kernel/v_row`.
      config: fields of the network's configuration (T5Config) that the checkpoint states; None where it states none.
      vocabulary_files: {feature: {file name: content}} of vocabularies that travel with it.
      inputs_bidirectional_attention: of a decoder-only model: it is a prefix LM.
      template: of a ranker, where the checkpoint states it.
      model_type: `t5`, `mt5` or `umt5`, where the checkpoint states it, as Hugging Face's do.
    """

    format: str
    path: str
    step: int | None
    arrays: Mapping[str, LazyArray]
    config: Mapping[str, Any] | None = None
    vocabulary_files: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    inputs_bidirectional_attention: bool = False
    template: Template | None = None
    model_type: str | None = None
