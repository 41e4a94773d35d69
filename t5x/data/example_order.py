"""The endless order of a source's examples: a new shuffle every epoch, without a table."""

import math
from typing import Any

import numpy as np

from t5x.data.pipeline import derive_seed

_ROUNDS = 16
_MASK = (1 << 64) - 1


def shuffled(index: int, size: int, key: int) -> int:
    """Return the image of `index` in the permutation of range(size) determined by `key`, without a table."""
    while (index := _permuted(index, size, key)) >= size:
        pass
    return index


def shuffled_all(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Return `shuffled` of many indices at once, each with its own key (uint64), as int64."""
    permuted = _permuted(indices.astype(np.uint64), size, keys)
    while (outside := permuted >= size).any():
        permuted[outside] = _permuted(permuted[outside], size, keys[outside])
    return permuted.astype(np.int64)


def _permuted(index: Any, size: int, key: Any) -> Any:
    """Permute numbers, or arrays of uint64, a little beyond range(size).

    A Feistel network over pairs (left, right) with about sqrt(size) values each; results outside range(size) must be
    permuted again. Saved positions depend on it: it must never change.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    left, right = divmod(index, columns)
    for round_number in range(0, _ROUNDS, 2):
        left = (left + mix(key + round_number, right) % rows) % rows
        right = (right + mix(key + round_number + 1, left) % columns) % columns
    return left * columns + right


def mix(key: Any, value: Any) -> Any:
    """Return a 64-bit hash of two numbers, or of two arrays of uint64."""
    mixed = (key + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class Order:
    """The endless order of `size` examples.

    Args:
      size: number of examples per epoch.
      seed: seed of the shuffle.
      shuffle: False keeps the order of the source in every epoch.
    """

    def __init__(self, size: int, seed: int, shuffle: bool):
        self.size = size
        self.shuffle = shuffle
        self._seed = seed
        self._key = -1, 0

    def __call__(self, position: int) -> tuple[int, int]:
        """Return (epoch, example index) of a position."""
        epoch, index = divmod(position, self.size)
        return epoch, shuffled(index, self.size, self._key_of(epoch)) if self.shuffle else index

    def block(self, first: int, step: int, count: int) -> list[tuple[int, int]]:
        """Return (epoch, example index) of `count` positions first, first + step, …, faster than one by one."""
        epochs, indices = np.divmod(first + step * np.arange(count), self.size)
        if self.shuffle:
            different, which = np.unique(epochs, return_inverse=True)
            keys = np.array([self._key_of(epoch) for epoch in different.tolist()], np.uint64)
            indices = shuffled_all(indices, self.size, keys[which])
        return list(zip(epochs.tolist(), indices.tolist(), strict=True))

    def _key_of(self, epoch: int) -> int:
        if self._key[0] != epoch:
            self._key = epoch, derive_seed("order", self._seed, epoch)
        return self._key[1]
