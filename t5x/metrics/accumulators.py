"""Figures of a run that are summed over steps, devices and microbatches: T5X's metric classes.

Each is a small tree of arrays with `merge` and `compute`, so that it can leave a compiled step and be added up later.
"""

import flax.struct
import jax

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
        return self.total / max(self.count, 1)


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


def to_json(metrics: Metrics) -> dict[str, list]:
    """Metrics on the host as JSON, exactly."""
    return {name: [type(m).__name__, *vars(m).values()] for name, m in metrics.items()}


def from_json(record: dict[str, list]) -> Metrics:
    """What `to_json` was given."""
    kinds = {kind.__name__: kind for kind in (Sum, Average, AveragePerStep)}
    return {name: kinds[kind](*values) for name, (kind, *values) in record.items()}


def compute(metrics: Metrics) -> dict[str, float]:
    """The figures as Python floats."""
    return {name: float(value.compute()) for name, value in metrics.items()}
