"""What a task's preprocessors may be besides functions of one example."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ConcatenateAndSplit:
    """A preprocessor over the whole stream: joins a feature of consecutive examples and cuts it into equal pieces.

    A task may have one. The examples behind it have that feature alone.

    Attributes:
      length: tokens of a piece; the last one of an evaluation may be shorter.
      feature: the one that is joined.
    """

    length: int
    feature: str = "targets"


class CacheDatasetPlaceholder:
    """Ends what a cache holds: the work of the preprocessors before it. Examples pass it unchanged."""

    def __init__(self, required: bool = False):
        self.required = required

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        return example


def composite(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Marks a preprocessor that is several: it is called once, with `sequence_length` and `output_features` if it has
    such parameters, and returns the list of preprocessors that it stands for.

    In a task it is written like any other, with `functools.partial` where it needs arguments.
    """
    function.composite = True
    return function


class _Key(np.random.bit_generator.ISeedSequence):
    """A seed that is random bits already. Without it numpy spends most of the time on making it so."""

    def __init__(self, key: int):
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.array([self._key] + [0] * (n_words - 1), dtype)


def generator(seed: int) -> np.random.Generator:
    """The random generator of a preprocessor's `seed`; cheap to make, one for each example."""
    return np.random.Generator(np.random.SFC64(_Key(seed)))
