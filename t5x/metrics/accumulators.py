"""Figures of a run that are summed over steps, devices and microbatches: T5X's metric classes.

Each is a small tree of arrays with `merge` and `compute`, so that it can leave a compiled step and be added up later.
"""

import flax.struct
import jax
import jax.numpy as jnp

Scalar = jax.Array | float | int


@flax.struct.dataclass
class Sum:
    """The sum of what was seen."""

    total: Scalar = 0.0

    def merge(self, other: "Sum") -> "Sum":
        return type(self)(self.total + other.total)

    def compute(self) -> Scalar:
        return self.total


@flax.struct.dataclass
class Average:
    """total / count, e.g. a loss per token."""

    total: Scalar = 0.0
    count: Scalar = 0

    def merge(self, other: "Average") -> "Average":
        return type(self)(self.total + other.total, self.count + other.count)

    def compute(self) -> Scalar:
        return jnp.where(self.count > 0, self.total / jnp.maximum(self.count, 1), 0.0)


@flax.struct.dataclass
class AveragePerStep:
    """total / steps; the microbatches of a step count as one."""

    total: Scalar = 0.0
    steps: Scalar = 1

    def merge(self, other: "AveragePerStep") -> "AveragePerStep":
        return type(self)(self.total + other.total, self.steps + other.steps)

    def compute(self) -> Scalar:
        return self.total / self.steps


Metrics = dict[str, Sum | Average | AveragePerStep]


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Both sets together; the names are those of `a`."""
    return {name: value.merge(b[name]) for name, value in a.items()}


def as_one_step(metrics: Metrics) -> Metrics:
    """The merged metrics of a step's microbatches, as those of one step."""
    one = lambda m: m.replace(steps=1) if isinstance(m, AveragePerStep) else m
    return {name: one(value) for name, value in metrics.items()}


def compute(metrics: Metrics) -> dict[str, float]:
    """The figures as Python floats."""
    return {name: float(value.compute()) for name, value in metrics.items()}
