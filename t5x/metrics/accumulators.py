"""Metrics that are accumulated over steps, devices and microbatches: T5X's metric classes.

Each is a small tree of arrays with `merge` and `compute`, so that a compiled step can return it.
"""

import operator
from typing import Self

import flax.struct
import jax

Scalar = jax.Array | float | int


class _Accumulator:
    def merge(self, other: Self) -> Self:
        """Add up all fields."""
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))


@flax.struct.dataclass
class Sum(_Accumulator):
    """A sum.

    Example:
      >>> Sum(1).merge(Sum(2)).compute()
      3
    """

    total: Scalar = 0.0

    def compute(self) -> Scalar:
        return self.total


@flax.struct.dataclass
class Average(_Accumulator):
    """total / count, e.g. a loss per token."""

    total: Scalar = 0.0
    count: Scalar = 0

    def compute(self) -> Scalar:
        return self.total / max(self.count, 1)


@flax.struct.dataclass
class AveragePerStep(_Accumulator):
    """total / steps; the microbatches of a step count as one."""

    total: Scalar = 0.0
    steps: Scalar = 1

    def compute(self) -> Scalar:
        return self.total / self.steps


Metrics = dict[str, Sum | Average | AveragePerStep]


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Merge two sets of metrics with the names of `a`."""
    return {name: value.merge(b[name]) for name, value in a.items()}


def as_one_step(metrics: Metrics) -> Metrics:
    """Count the merged metrics of a step's microbatches as one step."""
    return {name: m.replace(steps=1) if isinstance(m, AveragePerStep) else m for name, m in metrics.items()}


def to_json(metrics: Metrics) -> dict[str, list]:
    """Convert metrics on the host to JSON, without loss."""
    return {name: [type(m).__name__, *vars(m).values()] for name, m in metrics.items()}


def from_json(record: dict[str, list]) -> Metrics:
    """Convert the result of `to_json` back to metrics."""
    kinds = {kind.__name__: kind for kind in (Sum, Average, AveragePerStep)}
    return {name: kinds[kind](*values) for name, (kind, *values) in record.items()}


def compute(metrics: Metrics) -> dict[str, float]:
    """Return the values of the metrics as Python floats."""
    return {name: float(value.compute()) for name, value in metrics.items()}
