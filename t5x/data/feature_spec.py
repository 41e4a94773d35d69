"""The specification of a task's features, and what pipelines and caches need to know of each other."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from t5x.data.sources import DataSource
from t5x.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a task's examples.

    Attributes:
      vocabulary: converts its text to ids.
      add_eos: whether `append_eos` and similar preprocessors append EOS.
      required: whether every example must have it.
      dtype: anything that numpy accepts as a dtype; stored as its name.
      rank: number of dimensions.
    """

    vocabulary: Vocabulary
    add_eos: bool = True
    required: bool = True
    dtype: str | type | np.dtype = "int32"
    rank: int = 1

    def __post_init__(self):
        # TensorFlow's dtypes, common in seqio tasks, carry their numpy equivalent.
        object.__setattr__(self, "dtype", np.dtype(getattr(self.dtype, "as_numpy_dtype", self.dtype)).name)


class CacheableTask(Protocol):
    """What the cache of a task depends on."""

    name: str
    source: DataSource
    output_features: dict[str, Feature]
    preprocessors: tuple[Callable[..., Any], ...]


class ExamplesCache(Protocol):
    """The results of a task's first preprocessors; see `t5x.data.cache_reader.CachedExamples`."""

    steps: int
    num_examples: int
    info: dict[str, Any]

    def examples(self, index: int) -> list[dict[str, Any]]: ...
