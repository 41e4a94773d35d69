"""The endless order of a source's examples: a new shuffle every epoch, without a table."""

import math

import numpy as np

from t5x.data.pipeline import derive_seed

_ROUNDS = 16
_MASK = (1 << 64) - 1


def shuffled(index: int, size: int, key: int) -> int:
    """Return the image of `index` in the permutation of range(size) determined by `key`, without a table.

    A Feistel network over pairs (left, right) with about sqrt(size) values each; results outside range(size) are
    permuted again. Saved positions depend on it: it must never change.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        left, right = divmod(index, columns)
        for at in range(0, _ROUNDS, 2):
            left = (left + mix(key + at, right)) % rows
            right = (right + mix(key + at + 1, left)) % columns
        index = left * columns + right
        if index < size:
            return index


def mix(key: int, value: int) -> int:
    """Return a 64-bit hash of two numbers."""
    mixed = (key + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _mix_all(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return `mix` of many keys and numbers, uint64, which wraps by itself."""
    mixed = keys + (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def shuffled_all(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Return `shuffled` of many indices at once, each with its own key (uint64), as int64."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    found = indices.astype(np.uint64)
    pending = np.arange(len(found))
    while len(pending):
        left, right = np.divmod(found[pending], np.uint64(columns))
        for at in range(0, _ROUNDS, 2):
            left = (left + _mix_all(keys + np.uint64(at), right) % np.uint64(rows)) % np.uint64(rows)
            right = (right + _mix_all(keys + np.uint64(at + 1), left) % np.uint64(columns)) % np.uint64(columns)
        found[pending] = left * np.uint64(columns) + right
        again = found[pending] >= size
        pending, keys = pending[again], keys[again]
    return found.astype(np.int64)


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
