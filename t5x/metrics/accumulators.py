"""Metrics that are accumulated over steps, devices and microbatches: T5X's metric classes.

Each is a small tree of arrays with `merge` and `compute`, so that a compiled step can return it. The trainer takes any
class with these methods, such as those of clu.
"""

import dataclasses
import operator
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Number = jax.Array | np.ndarray | float | int


class Scalar(float):
    """A number that is also one of clu's scalars for code written for T5X: it has `value`, and equals theirs."""

    @property
    def value(self) -> float:
        return float(self)

    def __eq__(self, other: Any) -> bool:
        return float(self) == getattr(other, "value", other)

    __hash__ = float.__hash__


class Text(str):
    """A string that is also one of clu's texts, see `Scalar`."""

    value = property(str)

    def __eq__(self, other: Any) -> bool:
        return str(self) == getattr(other, "value", other)

    __hash__ = str.__hash__


class Metric:
    """The base of the classes below, with the methods of `clu.metrics.Metric`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def from_model_output(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the metric of one batch."""
        raise NotImplementedError(f"{cls.__name__}.from_model_output")

    @classmethod
    def from_output(cls, name: str) -> type[Self]:
        """Return a subclass whose `from_model_output` takes its values from the argument `name`."""
        return cls.from_fun(operator.itemgetter(name), takes_dictionary=True)

    @classmethod
    def from_fun(cls, fun: Callable[..., Any], takes_dictionary: bool = False) -> type[Self]:
        """Return a subclass whose `from_model_output` passes its keyword arguments through `fun` first."""

        @flax.struct.dataclass
        class Derived(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def from_model_output(derived, **outputs: Any) -> Self:
                return super().from_model_output(fun(outputs) if takes_dictionary else fun(**outputs))

        return Derived

    @classmethod
    def empty(cls) -> Self:
        """Return the metric that changes nothing when merged: zeros."""
        return cls(**{name: jnp.zeros((), jnp.float32) for name in cls.__dataclass_fields__})

    def merge(self, other: Self) -> Self:
        """Add up all fields."""
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def reduce(self) -> Self:
        """Merge the metrics that are stacked along the first axis."""
        first = jax.tree.map(lambda x: x[0], self)
        rest = jax.tree.map(lambda x: x[1:], self)
        return jax.lax.scan(lambda total, one: (total.merge(one), None), first, rest)[0]

    def compute(self) -> Any:
        """Return the value of the metric."""
        raise NotImplementedError(f"{type(self).__name__}.compute")

    def compute_value(self) -> Scalar:
        return Scalar(self.compute())


MetricsMap = MutableMapping[str, Metric]
Metrics = dict[str, Any]


def _total(values: Number) -> jax.Array:
    return jnp.sum(jnp.asarray(values))


@flax.struct.dataclass
class Sum(Metric):
    """A sum.

    Example:
      >>> Sum(1).merge(Sum(2)).compute()
      3
    """

    total: Number = 0.0

    @classmethod
    def from_model_output(cls, values: Number, **_: Any) -> Self:
        return cls(total=_total(values))

    def compute(self) -> Number:
        return self.total


@flax.struct.dataclass
class Average(Metric):
    """total / count, e.g. a loss per token."""

    total: Number = 0.0
    count: Number = 0

    @classmethod
    def from_model_output(cls, values: Number, mask: Number | None = None, **_: Any) -> Self:
        mask = jnp.ones_like(values) if mask is None else mask
        return cls(total=_total(values * mask), count=_total(mask))

    def compute(self) -> Number:
        return self.total / (max(self.count, 1) if isinstance(self.count, int | float) else jnp.maximum(self.count, 1))


@flax.struct.dataclass
class Step(Metric):
    """The number of steps."""

    steps: Number | None = 1

    def replace_steps(self, steps: Number) -> Self:
        return dataclasses.replace(self, steps=steps)

    def compute(self) -> Number:
        if self.steps is None:
            raise ValueError("`steps` is not set: call replace_steps before compute.")
        return self.steps


@flax.struct.dataclass
class AveragePerStep(Step):
    """total / steps; the microbatches of a step count as one."""

    total: Number | None = None

    @classmethod
    def from_model_output(cls, values: Number, steps: Number | None = 1, **_: Any) -> Self:
        return cls(total=_total(values), steps=steps)

    def compute(self) -> Number:
        if self.total is None:
            raise ValueError("`total` of AveragePerStep is not set.")
        return self.total / Step.compute(self)


@flax.struct.dataclass
class Time(Metric):
    """The seconds of the steps. A compiled step cannot measure them: the trainer sets them before `compute`."""

    duration: Number | None = None

    def replace_duration(self, duration: Number) -> Self:
        return dataclasses.replace(self, duration=duration)

    def merge(self, other: Self) -> Self:
        return self

    def compute(self) -> Number:
        if self.duration is None:
            raise ValueError("`duration` is not set: call replace_duration before compute.")
        return self.duration


@flax.struct.dataclass
class TimeRate(Time):
    """A sum per second."""

    numerator: Number | None = None

    @classmethod
    def from_model_output(cls, numerator: Number, **_: Any) -> Self:
        return cls(numerator=numerator)

    def merge(self, other: Self) -> Self:
        if self.duration is not None or other.duration is not None:
            raise AssertionError("TimeRate: metrics with a duration cannot be merged.")
        return type(self)(numerator=self._numerator() + other._numerator())

    def _numerator(self) -> Number:
        if self.numerator is None:
            raise ValueError("`numerator` of TimeRate is not set.")
        return self.numerator

    def compute(self) -> Number:
        return self._numerator() / Time.compute(self)


@flax.struct.dataclass
class StepsPerTime(Step, Time):
    """Steps per second."""

    @classmethod
    def from_model_output(cls, steps: Number | None = 1, **_: Any) -> Self:
        return cls(steps=steps)

    def merge(self, other: Self) -> Self:
        return type(self)(steps=Step.compute(self) + Step.compute(other))

    def compute(self) -> Number:
        return Step.compute(self) / Time.compute(self)


# --- Sets of metrics --------------------------------------------------------------------------------------------------


def is_metric_obj(obj: Any) -> bool:
    """Return whether an object has the methods of a metric."""
    return not isinstance(obj, type) and hasattr(obj, "merge") and hasattr(obj, "compute")


def is_time_metric(obj: Any) -> bool:
    return isinstance(obj, Time)


def create_metrics_dict(float_metrics_dict: dict[str, Number]) -> dict[str, Sum]:
    """Return each number as a Sum."""
    return {name: Sum(value) for name, value in float_metrics_dict.items()}


def shape_obj_to_defined_obj(obj: Any) -> Any:
    """Return a metric of shapes (the result of `jax.eval_shape`) with zeros in their place."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, obj)


def set_time_metrics_duration(metrics: Any, duration: Number) -> Any:
    """Set the duration of every `Time` in a tree of metrics."""
    replace = lambda metric: metric.replace_duration(duration) if is_time_metric(metric) else metric
    return jax.tree.map(replace, metrics, is_leaf=is_metric_obj)


def set_step_metrics_num_steps(metrics: Any, num_steps: Number) -> Any:
    """Set the number of steps of every `Step` in a tree of metrics."""
    replace = lambda metric: metric.replace_steps(num_steps) if isinstance(metric, Step) else metric
    return jax.tree.map(replace, metrics, is_leaf=is_metric_obj)


class _Stored(NamedTuple):
    """The arrays of a user's metric from a checkpoint; the next step shows its class."""

    leaves: list[Any]

    def merge(self, other: Any) -> Any:
        leaves = map(np.asarray, self.leaves)
        return jax.tree.unflatten(jax.tree.structure(other), leaves).merge(other)


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Merge two sets of metrics with the names of `a`."""
    return {name: value.merge(b[name]) for name, value in a.items()}


def as_one_step(metrics: Metrics) -> Metrics:
    """Count the merged metrics of a step's microbatches as one step."""
    return set_step_metrics_num_steps(metrics, 1)


_FIELDS = {Sum: ("total",), Average: ("total", "count"), AveragePerStep: ("total", "steps")}


def to_json(metrics: Metrics) -> dict[str, list]:
    """Convert metrics on the host to JSON, without loss."""

    def record(metric: Any) -> list[Any]:
        if fields := _FIELDS.get(type(metric)):
            return [type(metric).__name__, *(getattr(metric, field) for field in fields)]
        return ["", *(np.asarray(leaf).tolist() for leaf in jax.tree.leaves(metric))]

    return {name: record(metric) for name, metric in metrics.items()}


def from_json(record: dict[str, list]) -> Metrics:
    """Convert the result of `to_json` back to metrics."""
    kinds = {kind.__name__: (kind, fields) for kind, fields in _FIELDS.items()}

    def metric(kind: str, *values: Any) -> Any:
        if not kind:
            return _Stored(list(values))
        cls, fields = kinds[kind]
        return cls(**dict(zip(fields, values, strict=True)))

    return {name: metric(*values) for name, values in record.items()}


def compute(metrics: Metrics, duration: float | None = None, *, texts: bool = False) -> dict[str, Any]:
    """Return the values of the metrics as floats; arrays of a user's metrics become one value per element.

    Args:
      duration: seconds, for metrics of time; without it, these are excluded.
      texts: include metrics that are strings.
    """
    if duration is None:
        metrics = {name: metric for name, metric in metrics.items() if not is_time_metric(metric)}
    else:
        metrics = set_time_metrics_duration(metrics, duration)
    entries: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            value = np.asarray(metric.compute())
        except NotImplementedError:  # a metric of clu may define only this
            value = np.asarray(metric.compute_value().value)
        if value.dtype.kind in "US":
            entries |= {name: Text(value)} if texts else {}
        elif value.ndim == 0:
            entries[name] = Scalar(value)
        else:
            entries |= {f"{name}/{i}": Scalar(x) for i, x in enumerate(value.reshape(-1))}
    return entries
