"""Tasks and mixtures, and the registries in which gin files find them by name."""

import difflib
import logging
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from t5x._runtime import imports
from t5x._runtime.errors import UserError
from t5x.data import cache_reader
from t5x.data.pipeline import Feature, Pipeline, Preprocessor, count_cacheable
from t5x.data.sources import DataSource

logger = logging.getLogger(__name__)

Rate = float | Callable[["Task | Mixture"], float]


class Task:
    """A source, its preprocessors, and the metrics for predictions.

    Args:
      name: name in the registry.
      source: source of the examples.
      output_features: features of the finished examples.
      preprocessors: see `t5x.data.pipeline.Pipeline`.
      postprocess_fn: `postprocess_fn(decoded, example=…, is_target=…)` converts decoded text to what metrics compare.
      metric_fns: functions of `(targets, predictions)`, `(targets, scores)` or `(targets, predictions, aux_values)`;
        they return {metric: value}.
      shuffle_buffer_size: accepted for seqio compatibility; shuffling covers all examples, without a buffer.
      source_info: a note about the source, stored unchanged.
    """

    def __init__(
        self,
        name: str,
        source: DataSource,
        output_features: Mapping[str, Feature],
        preprocessors: Sequence[Preprocessor] | None = None,
        postprocess_fn: Callable[..., Any] | None = None,
        metric_fns: Sequence[Callable[..., Mapping[str, Any]]] | None = None,
        shuffle_buffer_size: int | None = None,
        source_info: Any = None,
    ):
        if not isinstance(source, DataSource):
            raise UserError(
                f"Task {name!r}: the source {source!r} is not a t5x.data source, such as JsonLinesDataSource, "
                "TextLineDataSource or FunctionDataSource."
            )
        for feature_name, feature in output_features.items():
            if not isinstance(feature, Feature):
                raise UserError(f"Task {name!r}: output feature {feature_name!r} is {feature!r}, not a Feature.")
        self.name = name
        self.source = source
        self.output_features = dict(output_features)
        self.preprocessors = tuple(preprocessors or ())
        self.metric_fns = tuple(metric_fns or ())
        self.source_info = source_info
        self._postprocess_fn = postprocess_fn

    @property
    def splits(self) -> tuple[str, ...]:
        return self.source.splits

    def num_input_examples(self, split: str) -> int:
        """Return the number of source examples, before any preprocessor."""
        return self.source.num_examples(split)

    def postprocess_fn(self, decoded_model_output: Any, **kwargs: Any) -> Any:
        """Return what metrics compare, for a prediction or for a target (`is_target=True`)."""
        if self._postprocess_fn is None:
            return decoded_model_output
        return self._postprocess_fn(decoded_model_output, **kwargs)

    def pipeline(
        self,
        split: str,
        sequence_length: Mapping[str, int] | None = None,
        seed: int = 0,
        runtime_preprocessors: Sequence[Preprocessor] | None = None,
        need_text: bool = True,
        use_cached: bool = False,
    ) -> Pipeline:
        """Return the finished examples of a split, by (epoch, index), from its cache if there is one (`t5x cache`).

        Args:
          need_text: False accepts a cache without texts (`inputs_pretokenized`, …).
          use_cached: the user asks for a cache. A cache is used anyway; it matters for tasks of the real seqio.
        """
        check_split(self, split)
        source, steps, cached = self._parts(split, sequence_length, seed, need_text, use_cached)
        steps = (*steps, *(runtime_preprocessors or ()))
        return Pipeline(self.name, source, split, steps, self.output_features, sequence_length, seed, cached)

    def _parts(
        self, split: str, sequence_length: Mapping[str, int] | None, seed: int, need_text: bool, use_cached: bool
    ) -> tuple[DataSource, Sequence[Preprocessor], cache_reader.CachedExamples | None]:
        """Return the source, the preprocessors and the cache of a `pipeline`."""
        cached = cache_reader.find(self, split, need_text=need_text)
        if use_cached and cached is None:
            logger.info("use_cached=True: task %r has no cache (see `t5x cache`); reading its source", self.name)
        return self.source, self.preprocessors, cached

    def uncached_pipeline(self, split: str, sequence_length: Mapping[str, int] | None, seed: int) -> Pipeline:
        """Return `pipeline` without a cache, so that every preprocessor runs."""
        return Pipeline(self.name, self.source, split, self.preprocessors, self.output_features, sequence_length, seed)

    def why_not_cached(self) -> str | None:
        """Return why a cache of this task would be empty, or None."""
        if count_cacheable(self.preprocessors):
            return None
        return (
            f"Task {self.name!r} has nothing to cache: its first preprocessor is random, depends on the sequence "
            "length, joins examples, or is CacheDatasetPlaceholder. Only preprocessors before such a one are cached."
        )

    def __repr__(self) -> str:
        return f"Task({self.name!r}, splits={self.splits})"


class Mixture:
    """Several tasks with rates, under one name.

    Args:
      name: name in the registry.
      tasks: names of tasks and mixtures, or (name, rate) pairs. A rate is a positive number or a function of the task.
      default_rate: rate of the tasks without their own.
    """

    def __init__(
        self, name: str, tasks: Iterable["str | tuple[str | Task | Mixture, Rate]"], default_rate: Rate | None = None
    ):
        self.name = name
        self.rates: dict[str | Task | Mixture, Rate] = {}
        for entry in tasks:
            task, rate = (entry, default_rate) if isinstance(entry, str) else entry
            if rate is None:
                raise UserError(f"Mixture {name!r}: {task!r} has no rate. Write ({task!r}, 1.0) or set default_rate.")
            if not callable(rate):
                _check_rate(name, task, rate)
            if task in self.rates:
                raise UserError(f"Mixture {name!r} names {task!r} twice.")
            get_mixture_or_task(task)
            self.rates[task] = rate
        if not self.rates:
            raise UserError(f"Mixture {name!r} has no tasks.")

    @property
    def tasks(self) -> list[Task]:
        """All tasks, including those of nested mixtures, each once."""
        by_name = {task.name: task for name in self.rates for task in get_subtasks(get_mixture_or_task(name))}
        return list(by_name.values())

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that at least one task has."""
        return tuple(dict.fromkeys(split for task in self.tasks for split in task.splits))

    @property
    def output_features(self) -> dict[str, Feature]:
        first, *others = self.tasks
        for task in others:
            if task.output_features != first.output_features:
                raise UserError(
                    f"Mixture {self.name!r}: the output features of {first.name!r} and {task.name!r} differ:\n"
                    f"{first.output_features}\n{task.output_features}\n"
                    "All tasks of a mixture need the same output features."
                )
        return first.output_features

    def num_input_examples(self, split: str) -> int:
        return sum(task.num_input_examples(split) for task in self.tasks if split in task.splits)

    def __repr__(self) -> str:
        return f"Mixture({self.name!r}, {self.rates})"


_T = TypeVar("_T", Task, Mixture)


class _Registry(Generic[_T]):
    def __init__(self, kind: type[_T]):
        self._kind: type[_T] = kind
        self._entries: dict[str, _T] = {}

    def add(self, name: str, *args: Any, **kwargs: Any) -> _T:
        """Create and register one; takes the arguments of the class."""
        if name in TaskRegistry.names() or name in MixtureRegistry.names():
            raise UserError(
                f"There already is a task or mixture {name!r}. Choose another name, or first call "
                f"{self._kind.__name__}Registry.remove({name!r})."
            )
        self._entries[name] = entry = self._kind(name, *args, **kwargs)
        return entry

    def get(self, name: str) -> _T:
        if name not in self._entries:
            raise UserError(_unknown(name, self._kind.__name__.lower(), self.names()))
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def remove(self, name: str) -> None:
        self.get(name)
        del self._entries[name]

    def reset(self) -> None:
        """Remove all entries."""
        self._entries.clear()


TaskRegistry = _Registry(Task)
MixtureRegistry = _Registry(Mixture)


class OtherRegistry(Protocol):
    """An external registry of tasks and mixtures, such as seqio's. It is searched after ours."""

    def find(self, name: Any) -> Task | Mixture | None: ...

    def names(self) -> tuple[str, ...]: ...


other_registries: list[OtherRegistry] = []


def get_mixture_or_task(name: str | Task | Mixture) -> Task | Mixture:
    """Return the registered task or mixture of this name, or else one of `other_registries`."""
    if isinstance(name, Task | Mixture):
        return name
    if name in MixtureRegistry.names():
        return MixtureRegistry.get(name)
    if name in TaskRegistry.names():
        return TaskRegistry.get(name)
    names = TaskRegistry.names() + MixtureRegistry.names()
    for registry in other_registries:
        if (task_or_mixture := registry.find(name)) is not None:
            return task_or_mixture
        names += registry.names()
    raise UserError(_unknown(name, "task or mixture", names))


def check_split(task_or_mixture: Task | Mixture, split: str) -> None:
    """Raise a UserError if there is no such split."""
    if split not in task_or_mixture.splits:
        raise UserError(
            f"{task_or_mixture.name!r} has no split {split!r}. Splits: {', '.join(map(repr, task_or_mixture.splits))}."
        )


def get_subtasks(task_or_mixture: Task | Mixture) -> list[Task]:
    """Return all tasks of a mixture, or [task] for a task."""
    return task_or_mixture.tasks if isinstance(task_or_mixture, Mixture) else [task_or_mixture]


def tasks_with_split(task_or_mixture: Task | Mixture, split: str, scope: str) -> list[Task]:
    """Return the tasks that have a split to evaluate; raise a UserError if none has.

    Args:
      scope: gin scope of the DatasetConfig, for the message.
    """
    tasks = get_subtasks(task_or_mixture)
    if matching := [task for task in tasks if split in task.splits]:
        return matching
    splits = "; ".join(f"{task.name}: {', '.join(task.splits)}" for task in tasks)
    raise UserError(
        f"Cannot evaluate {task_or_mixture.name!r} on split {split!r}, which it does not have ({splits}). "
        f"Choose one with --gin.{scope}/utils.DatasetConfig.split=\\'…\\'."
    )


def task_rates(task_or_mixture: Task | Mixture) -> dict[Task, float]:
    """Return the rate of each task; a nested mixture's rate is divided among its tasks.

    A rate that is a function is called with the task or the nested mixture.
    """
    if isinstance(task_or_mixture, Task):
        return {task_or_mixture: 1.0}
    rates: dict[Task, float] = {}
    for name, rate in task_or_mixture.rates.items():
        part = get_mixture_or_task(name)
        value = rate(part) if callable(rate) else rate
        _check_rate(task_or_mixture.name, name, value)
        below = task_rates(part)
        total = sum(below.values())
        for task, share in below.items():
            rates[task] = rates.get(task, 0.0) + float(value) * share / total
    return rates


def _check_rate(mixture: str, task: str | Task | Mixture, rate: Any) -> None:
    if not (isinstance(rate, numbers.Real) and 0 < float(rate) < math.inf):
        raise UserError(f"Mixture {mixture!r}: the rate of {task!r} is {rate!r}; rates are positive numbers.")


def rate_num_examples(
    task: Task | Mixture, maximum: int | None = None, temperature: float = 1.0, scale: float = 1.0, split: str = "train"
) -> float:
    """Return a rate proportional to the number of examples: `functools.partial(rate_num_examples, maximum=2**16)`.

    Args:
      maximum: limit on the number of examples.
      temperature: the number is raised to 1/temperature; above 1, small tasks are sampled more often.
      scale: multiplies the number.
    """
    number = task.num_input_examples(split) * scale
    if maximum is not None:
        number = min(number, maximum)
    return number ** (1.0 / temperature)


_OF_T5 = re.compile(r"(^|_)v\d{3}(_|$)|^(c4|mc4|glue|super_glue|wmt)_")  # names of public tasks: wmt_t2t_ende_v003


def _unknown(name: str, kind: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=4, cutoff=0.5) or sorted(names)[:8]
    hint = f"Similar names: {', '.join(near)}." if near else "None is registered."
    is_typo = difflib.get_close_matches(str(name), names, cutoff=0.8)
    if _OF_T5.search(str(name)) and "t5" not in sys.modules and not is_typo:
        return (
            f"There is no {kind} {name!r}. It looks like one of the package t5: pass --import=t5.data.tasks, write "
            "`import t5.data.mixtures` in a gin file, or bind MIXTURE_OR_TASK_MODULE = 't5.data.tasks'. Without t5, "
            f"these have only WMT, C4 and GLUE. To install it: {imports.INSTALL_T5}"
        )
    return (
        f"There is no {kind} {name!r}. {hint} Import the module that adds it to the TaskRegistry: --import=MODULE, "
        "`import my_tasks` in a gin file, or MIXTURE_OR_TASK_MODULE."
    )
