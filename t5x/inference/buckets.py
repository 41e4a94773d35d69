"""Batches of examples of similar length, padded to few different shapes."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

SHORTEST = 8
FEW = 8  # examples that `coarse_shape` computes in one batch
_COARSE = 128


class PlannedBatch(NamedTuple):
    """Examples that are computed together.

    Attributes:
      positions: positions of the examples.
      lengths: {feature: length} to which all of them are padded.
    """

    positions: list[int]
    lengths: dict[str, int]


def bucket(length: int, longest: int | None = None, steps: int = 2) -> int:
    """Return the smallest of 8, 12, 16, 24, 32, 48, 64, … that is not below `length`, but at most `longest`.

    Args:
      steps: number of steps between powers of two; more steps pad less but compile more.

    >>> [bucket(n) for n in (1, 8, 9, 13, 17, 100)], bucket(100, longest=100), bucket(100, steps=4)
    ([8, 8, 12, 16, 24, 128], 100, 112)
    """
    padded = SHORTEST
    if length > SHORTEST:
        half = 1 << (length - 1).bit_length() - 1
        step = max(half // steps, SHORTEST // 2)
        padded = half + -(-(length - half) // step) * step
    return padded if longest is None else min(padded, longest)


def coarse_bucket(length: int, longest: int | None = None) -> int:
    """Return the smallest of 128, 512, 2048, … that is not below `length`, but at most `longest`."""
    padded = _COARSE
    while padded < length:
        padded *= 4
    return padded if longest is None else min(padded, longest)


def coarse_shape(
    sizes: Mapping[str, Sequence[int]], longest: Mapping[str, int | None], multiple: int = 1
) -> tuple[int, dict[str, int]]:
    """Return the rows and lengths of the only batch of at most `FEW` examples, for interactive use.

    One to eight inputs of up to 512 tokens have three shapes: 1x128, 8x128 and 8x512. So interactive use compiles three
    programs at most, at the price of more padding.

    Args:
      sizes: {feature: size of each example}, for features that are padded only as far as needed.
      longest: {feature: maximum length} of all features, as in `plan_batches`.
      multiple: rows are rounded up to a multiple of this.

    >>> coarse_shape({"inputs": [9]}, {"inputs": 512}), coarse_shape({"inputs": [9, 300]}, {"inputs": 512})
    ((1, {'inputs': 128}), (8, {'inputs': 512}))
    """
    lengths = {feature: limit for feature, limit in longest.items() if limit is not None}
    lengths |= {feature: coarse_bucket(max(of_feature), longest[feature]) for feature, of_feature in sizes.items()}
    is_one = all(len(of_feature) == 1 and max(of_feature) <= _COARSE for of_feature in sizes.values())
    return -(-(1 if is_one else FEW) // multiple) * multiple, lengths


def plan_batches(
    count: int,
    sizes: Mapping[str, Sequence[int]],
    longest: Mapping[str, int | None],
    batch_size: int,
    steps: int = 2,
    includes: Callable[[int], bool] = lambda position: True,
) -> Iterator[PlannedBatch]:
    """Yield batches of `count` examples, the longest first.

    Args:
      sizes: {feature: size of each example}, for features that are padded only as far as their batch needs.
      longest: {feature: maximum length} of all features; None, only for those in `sizes`, is unlimited.
      batch_size: number of examples per batch; the last batch may be smaller.
      steps: see `bucket`.
      includes: whether to include an example; called once per example, when its batch is planned.
    """
    keys = list(zip(*sizes.values(), strict=True)) if sizes else [()] * count
    order = filter(includes, sorted(range(count), key=keys.__getitem__, reverse=True))
    fixed = {feature: limit for feature, limit in longest.items() if limit is not None}
    while positions := list(itertools.islice(order, batch_size)):
        lengths = {
            feature: bucket(max(of_feature[i] for i in positions), longest[feature], steps)
            for feature, of_feature in sizes.items()
        }
        yield PlannedBatch(positions, fixed | lengths)


def row_count(examples: int, batch_size: int, multiple: int = 1) -> int:
    """Return the rows of a batch: a power of two for few examples, at most `batch_size`, rounded up to a multiple.

    >>> row_count(3, 32), row_count(3, 32, multiple=8), row_count(100, 32)
    (4, 8, 32)
    """
    few = min(batch_size, 1 << max(examples - 1, 0).bit_length())
    return -(-few // multiple) * multiple
