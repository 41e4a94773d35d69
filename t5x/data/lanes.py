"""Lanes: the examples in row r of batch N depend only on the seed, r and N.

Row r of a global batch of B rows is lane r. It reads the positions r, r + B, r + 2B, … of each task's endless order,
with its own cursor, and samples the task of each example itself. Packing, and preprocessors that drop, multiply or join
examples, move only the cursors of their lane. A process therefore reads only its own lanes, and the batch is the same
however the lanes are divided among processes and workers.
"""

import bisect
import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.feature_converters import FeatureConverter
from t5x.data.pipeline import ConcatenateAndSplit, Example, Pipeline, derive_seed
from t5x.data.sources import BadExample

logger = logging.getLogger(__name__)

Row = dict[str, np.ndarray]
_LOGGED = 5
_BLOCK = 256
_FRUITLESS_EPOCHS = 10
_SHUFFLE_ROUNDS = 16
_LOW_64_BITS = (1 << 64) - 1


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
    for round_number in range(0, _SHUFFLE_ROUNDS, 2):
        left = (left + mix(key + round_number, right) % rows) % rows
        right = (right + mix(key + round_number + 1, left) % columns) % columns
    return left * columns + right


def mix(key: Any, value: Any) -> Any:
    """Return a 64-bit hash of two numbers, or of two arrays of uint64."""
    mixed = (key + (value + 1) * 0x9E3779B97F4A7C15) & _LOW_64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _LOW_64_BITS
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


class Position(NamedTuple):
    """The position of a stream.

    Attributes:
      cursor: number of the lane's positions in the order that are finished.
      used: number of examples already used of those made from the next position.
      offset: number of tokens already used of the next of these, if examples are joined.
      returned: number of examples already returned of the piece that starts here.
    """

    cursor: int = 0
    used: int = 0
    offset: int = 0
    returned: int = 0


class BadExamples:
    """Decides what happens to bad examples: counts them, and logs the first few, or raises the error of the first.

    Args:
      skip: False raises errors.

    Attributes:
      count: number of bad examples.
      first: error of the first one.
    """

    def __init__(self, skip: bool = True):
        self.skip = skip
        self.count = 0
        self.first: BadExample | None = None

    def add(self, error: BadExample) -> None:
        if not self.skip:
            raise error
        self.count += 1
        self.first = self.first or error
        if self.count <= _LOGGED:
            more = "; further bad examples are only counted" if self.count == _LOGGED else ""
            logger.warning("skipped: %s%s", error, more)


_RAISE = BadExamples(skip=False)


class Stream:
    """The endless examples of one task that a lane reads.

    Args:
      row, batch_size: the lane's row and the global batch size.
      order, pipeline: order and pipeline of the task.
      bad: see `LaneConfig`.
    """

    def __init__(
        self,
        row: int,
        batch_size: int,
        order: Order,
        pipeline: Pipeline,
        bad: BadExamples = _RAISE,
    ):
        self.position = Position()
        self._row, self._batch_size = row, batch_size
        self._order, self._pipeline = order, pipeline
        self._bad = bad
        self._block: list[tuple[int, int]] = []  # (epoch, index) of some cursors, from _block_start on
        self._block_start = 0
        self._read: tuple[int, list[Example], int] | None = None  # cursor, outputs, source index
        self._piece: tuple[Position, Position, list[Example], int] | None = None

    def seek(self, position: Position) -> None:
        self.position, self._read, self._piece = position, None, None

    def next(self) -> tuple[Example, int]:
        """Return (example, source index) and advance `position` past it."""
        if (pieces := self._pipeline.pieces) is not None:
            return self._next_of_piece(pieces)
        position, outputs, index = self._available(self.position)
        self.position = self._position_after(position, outputs)
        return outputs[position.used], index

    def _available(self, position: Position) -> tuple[Position, list[Example], int]:
        """Return (position, outputs, source index) of the first example at or after `position`."""
        fruitless = 0
        while True:
            if self._read is None or self._read[0] != position.cursor:
                self._read = (position.cursor, *self._outputs(position.cursor))
            _, outputs, index = self._read
            if position.used < len(outputs):
                return position, outputs, index
            position = Position(position.cursor + 1)
            fruitless += 1
            if fruitless % self._order.size == 0:
                self._check_for_examples(position.cursor)

    def _outputs(self, cursor: int) -> tuple[list[Example], int]:
        if not 0 <= cursor - self._block_start < len(self._block):
            self._block_start = cursor
            self._block = self._order.block(self._place(cursor), self._batch_size, _BLOCK)
        epoch, index = self._block[cursor - self._block_start]
        try:
            return self._pipeline.outputs(epoch, index), index
        except BadExample as error:
            self._bad.add(error)
            return [], index

    def _place(self, cursor: int) -> int:
        return self._row + cursor * self._batch_size

    @staticmethod
    def _position_after(position: Position, outputs: Sequence[Example]) -> Position:
        is_last = position.used + 1 == len(outputs)
        return Position(position.cursor + 1) if is_last else Position(position.cursor, position.used + 1)

    def _next_of_piece(self, pieces: ConcatenateAndSplit) -> tuple[Example, int]:
        while True:
            if self._piece is None:
                self._piece = self._make_piece(pieces, self.position._replace(returned=0))
            start, next_start, outputs, index = self._piece
            returned = self.position.returned
            if returned + 1 < len(outputs):
                self.position = start._replace(returned=returned + 1)
            else:
                self.position, self._piece = next_start, None
            if returned < len(outputs):
                return outputs[returned], index

    def _make_piece(
        self, pieces: ConcatenateAndSplit, position: Position
    ) -> tuple[Position, Position, list[Example], int]:
        """Return (start, start of the next piece, finished examples, source index) of the piece at `position`."""
        start, first, missing, empty = position, 0, pieces.length, 0
        parts: list[np.ndarray] = []
        while missing:
            position, outputs, index = self._available(position)
            first = first if parts else index
            document = _tokens(outputs[position.used], pieces.feature)
            tokens = document[position.offset : position.offset + missing]
            empty = 0 if len(tokens) else empty + 1
            if empty > self._order.size:
                raise UserError(f"No example of task {self._pipeline.name!r} has any tokens in {pieces.feature!r}.")
            parts.append(tokens)
            missing -= len(tokens)
            end = position.offset + len(tokens)
            position = position._replace(offset=end) if end < len(document) else self._position_after(position, outputs)
        place = (self._place(start.cursor), start.used, start.offset)
        return start, position, self._pipeline.piece_outputs(np.concatenate(parts), place, first), first

    def _check_for_examples(self, cursor: int) -> None:
        """Raise a UserError if no example can follow, after a whole epoch of dropped examples."""
        label = f"split {self._pipeline.split!r} of task {self._pipeline.name!r}"
        size = self._order.size
        epoch = self._place(cursor) // size
        if not any(self._any_output(epoch, index) for index in range(size)):
            if self._bad.skip and not self._pipeline.dropped:
                raise UserError(f"None of the {size} examples in {label} can be read. The first: {self._bad.first}")
            by = ", ".join(f"{name} ({count})" for name, count in self._pipeline.dropped.most_common())
            raise UserError(f"The preprocessors drop all {size} examples in {label}. Dropped by: {by}.")
        if not self._order.shuffle and (stride := math.gcd(size, self._batch_size)) > 1:
            raise UserError(
                f"Row {self._row} of the batch has no examples: without shuffling it always reads the same "
                f"{size // stride} of the {size} examples in {label}, and the preprocessors drop these. Set "
                "shuffle=True, or a batch size that has no factor in common with the number of examples."
            )

    def _any_output(self, epoch: int, index: int) -> bool:
        try:
            return bool(self._pipeline.outputs(epoch, index))
        except BadExample:
            return False


def _tokens(example: Example, feature: str) -> np.ndarray:
    if feature not in example:
        raise UserError(f"Cannot join an example without {feature!r}; it has {', '.join(example)}.")
    return np.asarray(example[feature])


class LaneConfig(NamedTuple):
    """Settings that the lanes of a run share.

    Attributes:
      pipelines: pipelines of the tasks.
      rates: positive rate of each task.
      converter, lengths: convert examples to a row; lengths are those of task features.
      batch_size: rows of the global batch.
      shuffle: use a different order each epoch.
      trim: truncate features that are too long; otherwise they are bad examples.
      bad: skips and counts bad examples, or raises their errors.
    """

    pipelines: Sequence[Pipeline]
    rates: Sequence[float]
    converter: FeatureConverter
    lengths: Mapping[str, int]
    batch_size: int
    shuffle: bool = True
    trim: bool = True
    bad: BadExamples = _RAISE

    def lanes(self, rows: Iterable[int]) -> list["Lane"]:
        alone = len(self.pipelines) == 1
        orders = [Order(len(p), p.seed if alone else derive_seed(p.name, p.seed), self.shuffle) for p in self.pipelines]
        return [Lane(row, self, orders) for row in rows]


class _Sampled(NamedTuple):
    """An example, its source index, the number of its stream, and that stream's position before it."""

    example: Example
    source_index: int
    stream: int
    before: Position


class Lane:
    """One row of the global batch, endless."""

    def __init__(self, row: int, config: LaneConfig, orders: Sequence[Order]):
        self.row = row
        self._config = config
        self._streams = [
            Stream(row, config.batch_size, order, pipeline, config.bad)
            for order, pipeline in zip(orders, config.pipelines, strict=True)
        ]
        total = sum(config.rates)
        self._cumulative = [rate / total for rate in itertools.accumulate(config.rates)]
        self._key = derive_seed("mixture", config.pipelines[0].seed, row)
        self._draws = 0
        self._held: _Sampled | None = None  # did not fit into the last row

    def next_row(self) -> Row:
        """Return the model features of the lane's next row."""
        config, converter = self._config, self._config.converter
        room = np.asarray(converter.capacity(config.lengths)) if converter.pack else None
        packed: list[_Sampled] = []
        skipped: dict[int, int] = {}
        while True:
            one = self._take()
            try:
                with self._located(one):
                    if room is None:
                        return converter.convert_row([one.example], config.lengths, trim=config.trim)
                    size = converter.sizes(one.example, config.lengths, trim=config.trim)
            except BadExample as error:
                config.bad.add(error)
                self._check_progress(one, skipped, "is invalid; the log above has the first errors")
                continue
            if not any(size):  # empty: nothing to train on
                self._check_progress(one, skipped, "is empty")
                continue
            room = room - size
            if packed and (room < 0).any():
                self._held = one
                break
            packed.append(one)
            if not room.all():
                break
        with self._located(packed[0]):
            return converter.convert_row([one.example for one in packed], config.lengths, trim=config.trim)

    def _check_progress(self, one: "_Sampled", skipped: dict[int, int], why: str) -> None:
        """Raise a UserError if a stream has had nothing but skipped examples for very long.

        Args:
          skipped: for each stream, the cursor at the first example skipped for this row.
        """
        pipeline, cursor = self._config.pipelines[one.stream], one.before.cursor
        if cursor - skipped.setdefault(one.stream, cursor) > _FRUITLESS_EPOCHS * len(pipeline):
            raise UserError(f"Every example of task {pipeline.name!r} {why}.")

    def _take(self) -> "_Sampled":
        if self._held is not None:
            held, self._held = self._held, None
            return held
        number = 0
        if len(self._streams) > 1:
            number = bisect.bisect_right(self._cumulative, mix(self._key, self._draws) / 2**64)
            number = min(number, len(self._streams) - 1)
            self._draws += 1
        before = self._streams[number].position
        return _Sampled(*self._streams[number].next(), number, before)

    def _located(self, sampled: "_Sampled") -> AbstractContextManager[None]:
        return self._config.pipelines[sampled.stream].located(sampled.source_index)

    def state(self) -> list[int]:
        """Return the numbers that `seek` takes: how many tasks were sampled, then the position in each stream."""
        positions = [stream.position for stream in self._streams]
        draws = self._draws
        if self._held is not None:  # it will be sampled again
            positions[self._held.stream] = self._held.before
            draws -= len(self._streams) > 1
        return [draws, *itertools.chain.from_iterable(positions)]

    def seek(self, state: Sequence[int]) -> None:
        self._held = None
        self._draws, *flat = state
        width = len(Position._fields)
        for number, stream in enumerate(self._streams):
            stream.seek(Position(*flat[number * width : (number + 1) * width]))


def join_states(runs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Join [first row, number of rows, *state] of consecutive rows with equal states."""
    joined: list[list[int]] = []
    for row, count, *state in runs:
        if joined and joined[-1][0] + joined[-1][1] == row and joined[-1][2:] == state:
            joined[-1][1] += count
        else:
            joined.append([row, count, *state])
    return joined


def states_of_rows(rows: Iterable[int], states: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the states of these rows, one list per row; `states` may cover more rows."""
    by_row = {first + i: state for first, count, *state in states for i in range(count)}
    rows = list(rows)
    missing = [row for row in rows if row not in by_row]
    if missing:
        raise UserError(
            f"The data state lacks row {missing[0]} of the batch"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}. Merge the states of all processes that "
            "saved it (t5x.data.merge_states)."
        )
    return [[row, 1, *by_row[row]] for row in rows]


def resized_states(states: Sequence[Sequence[int]], batch_size: int, new_batch_size: int) -> list[list[int]]:
    """Return states for another batch size: all lanes resume after the last example that any lane has read.

    Nothing is read twice. Examples between the cursors of the old lanes are skipped in that epoch; there are few if the
    lanes have advanced evenly.
    """
    width = len(Position._fields)
    lanes = [(first + i, state) for first, count, *state in states for i in range(count)]
    resized = [max(draws for _, (draws, *_) in lanes)]
    for start in range(1, len(lanes[0][1]), width):
        positions = [(row, Position(*state[start : start + width])) for row, state in lanes]
        begun = [row + start.cursor * batch_size for row, start in positions if start != Position(start.cursor)]
        done = [row + (position.cursor - 1) * batch_size for row, position in positions if position.cursor]
        resized += Position(-(-(max(begun + done, default=-1) + 1) // new_batch_size))
    return [[0, new_batch_size, *resized]]


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states that several processes saved at the same step into one state of all rows."""
    first = dict(states[0])
    for other in states[1:]:
        if differences := describe_differences(first, other, ignore=["lanes"]):
            raise UserError(f"These data states are not from one step of one run: {'; '.join(differences)}.")
    return first | {"lanes": join_states(sorted(list(run) for state in states for run in state["lanes"]))}


def describe_differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], ignore: Sequence[str] = ()
) -> list[str]:
    """Describe each entry that differs, as `name is expected, not found`."""
    names = [name for name in dict(expected) | dict(actual) if expected.get(name) != actual.get(name)]
    return [f"{name} is {expected.get(name)!r}, not {actual.get(name)!r}" for name in names if name not in ignore]
