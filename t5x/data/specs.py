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


@dataclasses.dataclass(frozen=True)
class ConcatenateAndSplit:
    """A preprocessor of the whole stream: joins a feature of consecutive examples and splits it into equal pieces.

    A task may have one. The examples after it have only that feature.

    Attributes:
      length: tokens per piece; the last one of an evaluation may be shorter.
      feature: the feature to join.
    """

    length: int
    feature: str = "targets"


class CacheDatasetPlaceholder:
    """Marks the end of the preprocessors that a cache covers. Examples pass unchanged."""

    def __init__(self, required: bool = False):
        self.required = required

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        return example


def composite(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Mark a preprocessor that stands for several.

    It is called once, with `sequence_length` and `output_features` if it has such parameters, and returns a list of
    preprocessors. A task uses it like any other, with `functools.partial` if it needs arguments.
    """
    function.composite = True  # type: ignore[attr-defined]
    return function


class _Key(np.random.bit_generator.ISeedSequence):
    """A seed that already consists of random bits. It saves the time numpy would spend on mixing the seed."""

    def __init__(self, key: int):
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.array([self._key] + [0] * (n_words - 1), dtype)


def generator(seed: int) -> np.random.Generator:
    """Return the random generator for a preprocessor's `seed`; cheap enough for one per example."""
    return np.random.Generator(np.random.SFC64(_Key(seed)))  # type: ignore[arg-type]
