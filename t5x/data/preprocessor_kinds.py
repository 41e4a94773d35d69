"""Kinds of preprocessors besides functions of one example."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


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
