"""Batches of examples of similar length, padded to few different shapes."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

SHORTEST = 8


class Batch(NamedTuple):
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
    found = SHORTEST
    if length > SHORTEST:
        half = 1 << (length - 1).bit_length() - 1
        step = max(half // steps, SHORTEST // 2)
        found = half + -(-(length - half) // step) * step
    return found if longest is None else min(found, longest)


def plan(
    count: int,
    sizes: Mapping[str, Sequence[int]],
    longest: Mapping[str, int | None],
    batch_size: int,
    steps: int = 2,
    wanted: Callable[[int], bool] = lambda position: True,
) -> Iterator[Batch]:
    """Yield batches of `count` examples, the longest first.

    Args:
      sizes: {feature: size of each example}, for features that are padded only as far as their batch needs.
      longest: {feature: maximum length} of all features; None, only for those in `sizes`, is unlimited.
      batch_size: number of examples per batch; the last batch may be smaller.
      steps: see `bucket`.
      wanted: whether to include an example; called once per example, when its batch is made.
    """
    keys = list(zip(*sizes.values(), strict=True)) if sizes else [()] * count
    order = filter(wanted, sorted(range(count), key=keys.__getitem__, reverse=True))
    while positions := list(itertools.islice(order, batch_size)):
        lengths = {
            feature: bucket(max(sizes[feature][i] for i in positions), limit, steps) if feature in sizes else limit
            for feature, limit in longest.items()
        }
        yield Batch(positions, lengths)


def rows(examples: int, batch_size: int, multiple: int = 1) -> int:
    """Return the rows of a batch: a power of two for few examples, at most `batch_size`, rounded up to a multiple.

    >>> rows(3, 32), rows(3, 32, multiple=8), rows(100, 32)
    (4, 8, 32)
    """
    few = min(batch_size, 1 << max(examples - 1, 0).bit_length())
    return -(-few // multiple) * multiple
