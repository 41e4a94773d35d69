"""Which examples row r of batch N holds: a function of the seed, r and N alone.

The source examples stand in one endless order: epoch after epoch, each in its own shuffle. Row r of a global batch of
B rows is lane r: it reads the positions r, r + B, r + 2B, … of that order, and has its own cursor. Preprocessors that
drop examples or make several of one move the cursor of their lane only, so that a process needs to read nothing but
its own lanes, and the batch is the same however the lanes are divided among processes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from t5x.data.pipeline import Example, Pipeline, derive_seed
from t5x.errors import UserError

_ROUNDS = 16
_MASK = (1 << 64) - 1


def shuffled(index: int, size: int, key: int) -> int:
    """Where `index` goes in the permutation of range(size) that belongs to `key`; no table is needed.

    A Feistel network over pairs (left, right) with about sqrt(size) values each; what falls outside range(size) goes
    round again. Saved positions depend on it: it must never change.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        left, right = divmod(index, columns)
        for at in range(0, _ROUNDS, 2):
            left = (left + _mix(key + at, right)) % rows
            right = (right + _mix(key + at + 1, left)) % columns
        index = left * columns + right
        if index < size:
            return index


def _mix(key: int, value: int) -> int:
    """A 64-bit hash of two numbers."""
    mixed = (key + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class Order:
    """The endless order of `size` examples.

    Args:
      size: number of examples of an epoch.
      seed: of the shuffle.
      shuffle: False keeps the order of the source in every epoch.
    """

    def __init__(self, size: int, seed: int, shuffle: bool):
        self.size = size
        self.shuffle = shuffle
        self._seed = seed
        self._key = -1, 0

    def __call__(self, position: int) -> tuple[int, int]:
        """(epoch, example index) of a position."""
        epoch, index = divmod(position, self.size)
        if not self.shuffle:
            return epoch, index
        if self._key[0] != epoch:
            self._key = epoch, derive_seed("order", self._seed, epoch)
        return epoch, shuffled(index, self.size, self._key[1])


class Lane:
    """One row of the global batch: an endless iterator over (example, source index).

    Attributes:
      cursor: number of positions done with.
      used: how many of the examples that the next position becomes were handed out already.
    """

    def __init__(self, row: int, batch_size: int, order: Order, pipeline: Pipeline):
        self.row = row
        self.cursor = 0
        self.used = 0
        self._batch_size = batch_size
        self._order = order
        self._pipeline = pipeline
        self._outputs: list[Example] | None = None

    def seek(self, cursor: int, used: int) -> None:
        self.cursor, self.used, self._outputs = cursor, used, None

    def __iter__(self) -> Iterator[tuple[Example, int]]:
        return self

    def __next__(self) -> tuple[Example, int]:
        fruitless = 0
        while True:
            epoch, index = self._order(self.row + self.cursor * self._batch_size)
            if self._outputs is None:
                self._outputs = self._pipeline.outputs(epoch, index)
            if self.used < len(self._outputs):
                example = self._outputs[self.used]
                self.used += 1
                if self.used == len(self._outputs):
                    self.seek(self.cursor + 1, 0)
                return example, index
            self.seek(self.cursor + 1, 0)
            fruitless += 1
            if fruitless % self._order.size == 0:
                self._check_for_examples(epoch)

    def _check_for_examples(self, epoch: int) -> None:
        """After a whole epoch's worth of dropped examples: a UserError where nothing can follow."""
        label = f"split {self._pipeline.split!r} of task {self._pipeline.name!r}"
        size = self._order.size
        if not any(self._pipeline.outputs(epoch, index) for index in range(size)):
            by = ", ".join(f"{name} ({count})" for name, count in self._pipeline.dropped.most_common())
            raise UserError(
                f"No example is left of the {size} in {label}: its preprocessors drop them all. Dropped by: {by}."
            )
        if not self._order.shuffle and (stride := math.gcd(size, self._batch_size)) > 1:
            raise UserError(
                f"Row {self.row} of the batch has no examples: without shuffling it reads the same {size // stride} of "
                f"the {size} in {label} again and again, and the preprocessors drop them all. Set shuffle=True, or a "
                "batch size that has no factor in common with the number of examples."
            )


def lane_states(lanes: Sequence[Lane]) -> list[list[int]]:
    """[first row, number of rows, cursor, used] of each run of rows that stand alike."""
    return _joined([lane.row, 1, lane.cursor, lane.used] for lane in lanes)


def _joined(runs: Iterable[Sequence[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for row, count, cursor, used in runs:
        if joined and joined[-1][0] + joined[-1][1] == row and joined[-1][2:] == [cursor, used]:
            joined[-1][1] += count
        else:
            joined.append([row, count, cursor, used])
    return joined


def seek_lanes(lanes: Sequence[Lane], states: Sequence[Sequence[int]]) -> None:
    """Moves the lanes to where `states` says; it may say more than these lanes."""
    positions = {first + i: (cursor, used) for first, count, cursor, used in states for i in range(count)}
    missing = [lane.row for lane in lanes if lane.row not in positions]
    if missing:
        raise UserError(
            f"The data state is of other rows of the batch: it does not cover row {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}. Merge the states of all processes that "
            "saved it (t5x.data.merge_states)."
        )
    for lane in lanes:
        lane.seek(*positions[lane.row])


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of all rows from those that several processes saved at the same step."""
    first = dict(states[0])
    for other in states[1:]:
        if difference := describe_difference(first | {"lanes": None}, dict(other) | {"lanes": None}):
            raise UserError(f"These data states are not of one step of one run: {difference}.")
    return first | {"lanes": _joined(sorted(list(run) for state in states for run in state["lanes"]))}


def describe_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """`name: expected, not found` of each entry that differs."""
    names = [name for name in expected | found if expected.get(name) != found.get(name)]
    return "; ".join(f"{name} is {expected.get(name)!r}, not {found.get(name)!r}" for name in names)
