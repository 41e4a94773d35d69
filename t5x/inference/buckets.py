"""Which examples are computed together: those of similar length, in batches of few different shapes."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

SHORTEST = 8


class Batch(NamedTuple):
    """Examples that are computed together.

    Attributes:
      positions: which of the examples.
      lengths: {feature: length} that all of them are padded to.
    """

    positions: list[int]
    lengths: dict[str, int]


def bucket(length: int, longest: int | None = None, steps: int = 2) -> int:
    """The next of 8, 12, 16, 24, 32, 48, 64, …; `longest` at most.

    Args:
      steps: from one power of two to the next; more of them pad less and compile more.

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
    """Batches of `count` examples, the longest first.

    Args:
      sizes: {feature: size of each example}, of features that are padded only as far as their batch needs it.
      longest: {feature: length}, of all features; None, of those in `sizes`, is no limit.
      batch_size: examples in a batch; the last has what is left.
      steps: see `bucket`.
      wanted: whether an example is in any batch; asked once, when its batch is made.
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
    """Rows of a batch for a run of so few examples: a power of two, `batch_size` at most, and a multiple.

    >>> rows(3, 32), rows(3, 32, multiple=8), rows(100, 32)
    (4, 8, 32)
    """
    few = min(batch_size, 1 << max(examples - 1, 0).bit_length())
    return -(-few // multiple) * multiple
