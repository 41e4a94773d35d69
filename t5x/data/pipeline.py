"""From a source example to finished examples: a pure function of (seed, epoch, index)."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.sources import BadExample, DataSource
from t5x.data.vocabularies import Vocabulary

Example = dict[str, Any]
Preprocessor = Callable[..., Example | Iterable[Example] | None]
Place = tuple[int | str, ...]  # what the seeds of an example depend on

# fmt: off
_TF_DATA_METHODS = {
    "map", "filter", "flat_map", "batch", "unbatch", "take", "skip", "shuffle", "repeat", "enumerate", "cache",
    "prefetch", "interleave", "concatenate", "zip",
}
# fmt: on
_BRIDGE = "register the task in the real seqio (pip install -e '.[tf]', docs/seqio.md)"


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit number that depends on all parts and on nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Key(np.random.bit_generator.ISeedSequence):
    """A seed that already consists of random bits. It saves the time numpy would spend on mixing the seed."""

    def __init__(self, key: int):
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.array([self._key] + [0] * (n_words - 1), dtype)


def generator(seed: int) -> np.random.Generator:
    """Return the random generator for a preprocessor's `seed`; cheap enough for one per example."""
    return np.random.Generator(np.random.SFC64(_Key(seed)))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a task's examples.

    Attributes:
      vocabulary: converts its text to ids.
      add_eos: whether `append_eos` and similar preprocessors append EOS.
      required: whether every example must have it.
      dtype: anything that numpy accepts as a dtype; stored as its name.
      rank: number of dimensions.
    """

    vocabulary: Vocabulary
    add_eos: bool = True
    required: bool = True
    dtype: str | type | np.dtype = "int32"
    rank: int = 1

    def __post_init__(self):
        # TensorFlow's dtypes, common in seqio tasks, carry their numpy equivalent.
        object.__setattr__(self, "dtype", np.dtype(getattr(self.dtype, "as_numpy_dtype", self.dtype)).name)


class CacheableTask(Protocol):
    """What the cache of a task depends on."""

    name: str
    source: DataSource
    output_features: dict[str, Feature]
    preprocessors: tuple[Callable[..., Any], ...]


class ExamplesCache(Protocol):
    """The results of a task's first preprocessors; see `t5x.data.cache_reader.CachedExamples`."""

    steps: int
    num_examples: int
    info: dict[str, Any]

    def examples(self, index: int) -> list[dict[str, Any]]: ...


@dataclasses.dataclass(frozen=True)
class ConcatenateAndSplit:
    """A preprocessor of the whole stream: joins a feature of consecutive examples and splits it into equal pieces.

    A task may have one. The examples after it have only that feature.

    Attributes:
      length: tokens per piece; the last one of an evaluation may be shorter.
      feature: the feature to join.
    """

    length: int
    feature: str = "targets"


class CacheDatasetPlaceholder:
    """Marks the end of the preprocessors that a cache covers. Examples pass unchanged."""

    def __init__(self, required: bool = False):
        self.required = required

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        return example


def composite(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Mark a preprocessor that stands for several.

    It is called once, with `sequence_length` and `output_features` if it has such parameters, and returns a list of
    preprocessors. A task uses it like any other, with `functools.partial` if it needs arguments.
    """
    function.composite = True  # type: ignore[attr-defined]
    return function


class Pipeline:
    """The examples of one split of a task, ready for a feature converter.

    Args:
      name: name of the task, for messages.
      source, split: where examples come from.
      preprocessors: applied in order. Each takes an example and returns one, None (which drops it) or several. The
        keyword arguments `output_features`, `sequence_length` and `seed` are passed to those that have such a
        parameter, unless it is already bound; `seed` differs for every (epoch, example, preprocessor). `draw_seed` is a
        function that returns it, for preprocessors that rarely need one. For other kinds see
        `ConcatenateAndSplit` and `composite`.
      output_features: features that finished examples must have. Other fields are left as they are.
      sequence_length: {feature: length} for preprocessors, or None.
      seed: seed of all random preprocessors.
      cached: results of the first `cached.steps` preprocessors.
    """

    def __init__(
        self,
        name: str,
        source: DataSource,
        split: str,
        preprocessors: Sequence[Preprocessor],
        output_features: Mapping[str, Feature],
        sequence_length: Mapping[str, int] | None = None,
        seed: int = 0,
        cached: ExamplesCache | None = None,
    ):
        source.check_split(split)
        for feature in output_features.values():
            feature.vocabulary.vocab_size  # noqa: B018 - read its file now: a missing file is not a data error
        self.name = name
        self.split = split
        self.seed = seed
        self.output_features = output_features
        self.dropped: collections.Counter[str] = collections.Counter()
        self.trimmed: collections.Counter[str] = collections.Counter()
        self._source = source
        self.cached = cached
        self.preprocessors = tuple(preprocessors)
        available = {"output_features": output_features, "sequence_length": sequence_length}
        steps = list(_expanded(preprocessors, available))
        joins = [number for number, step in enumerate(steps) if isinstance(step, ConcatenateAndSplit)]
        if len(joins) > 1:
            raise UserError(f"Task {name!r} has {len(joins)} preprocessors that join examples; only one is supported.")
        end = joins[0] if joins else len(steps)
        self.pieces: ConcatenateAndSplit | None = steps[end] if joins else None
        numbered = [_Step(function, available, number) for number, function in enumerate(steps[:end])]
        self._steps = numbered[cached.steps if cached else 0 :]
        self._piece_steps = [_Step(function, available, number) for number, function in enumerate(steps[end + 1 :])]

    def __len__(self) -> int:
        """Return the number of source examples; preprocessors may return more or fewer."""
        return self.cached.num_examples if self.cached else self._source.num_examples(self.split)

    def __getstate__(self) -> dict[str, Any]:
        # Preprocessors that a cache has applied may not be picklable, and workers do not need them.
        return vars(self) | {"preprocessors": ()}

    def content_fingerprint(self) -> Callable[[], dict[str, Any] | None]:
        """See `DataSource.content_fingerprint`; returns None for a cache that does not record its source's content."""
        if (cached := self.cached) is None:
            return self._source.content_fingerprint(self.split)
        return lambda: cached.info.get("content")

    def content_bytes(self) -> int:
        """See `DataSource.content_bytes`."""
        return 0 if self.cached else self._source.content_bytes(self.split)

    def source_fingerprint(self) -> dict[str, Any]:
        """See `DataSource.fingerprint`."""
        return self.cached.info["identity"]["source"] if self.cached else self._source.fingerprint(self.split)

    def outputs(self, epoch: int, index: int) -> list[Example]:
        """Return the examples made from source example `index` in `epoch`: none, one or several.

        If examples are joined (`pieces`), these are the unfinished examples before joining.
        """
        examples = self.unfinished(epoch, index)
        return examples if self.pieces else [self._finish(example, index) for example in examples]

    def unfinished(self, epoch: int, index: int) -> list[Example]:
        """Return `outputs` before they are checked against the output features."""
        examples = self.cached.examples(index) if self.cached else [self._source.example(self.split, index)]
        if not examples:
            self.dropped["cached preprocessors"] += 1
        return self._run(self._steps, examples, (epoch, index), index)

    def piece_outputs(self, tokens: np.ndarray, place: tuple[int, ...], index: int) -> list[Example]:
        """Return the finished examples made from a piece of joined examples.

        Args:
          place: position of the piece in the order of the examples; it seeds random preprocessors.
          index: index of the source example in which the piece starts, for messages.
        """
        examples = self._run(self._piece_steps, [self._piece(tokens)], ("piece", *place), index)
        return [self._finish(example, index) for example in examples]

    def stages(self, epoch: int, index: int) -> list[tuple[str, list[Example]]]:
        """Return (name, examples) of source example `index`: first "source", then each preprocessor up to joining.

        For inspection, without a cache; training reads `outputs`.
        """
        return self._stages(self._steps, lambda: self._source.example(self.split, index), (epoch, index), index)

    def piece_stages(self, tokens: np.ndarray, place: tuple[int, ...], index: int) -> list[tuple[str, list[Example]]]:
        """Return the `stages` of a piece of joined examples; arguments as for `piece_outputs`."""
        return self._stages(self._piece_steps, lambda: self._piece(tokens), ("piece", *place), index)

    def _piece(self, tokens: np.ndarray) -> Example:
        assert self.pieces is not None, "the task joins no examples"
        return {self.pieces.feature: tokens}

    def _stages(
        self, steps: Sequence["_Step"], read: Callable[[], Example], place: Place, index: int
    ) -> list[tuple[str, list[Example]]]:
        names = ["source", *(step.name for step in steps)]
        return [(name, self._run(steps[:count], [read()], place, index)) for count, name in enumerate(names)]

    def _run(self, steps: Sequence["_Step"], examples: list[Example], place: Place, index: int) -> list[Example]:
        for step in steps:
            examples = self._apply(step, examples, place, index) if examples else []
        return examples

    def _apply(self, step: "_Step", examples: list[Example], place: Place, index: int) -> list[Example]:
        """Return what a preprocessor makes of the examples of a place."""
        results: list[Example] = []
        arguments = step.arguments
        for ordinal, example in enumerate(examples):
            if step.wants_seed:
                arguments = {**arguments, "seed": derive_seed(self.seed, *place, step.number, ordinal)}
            elif step.draws_seed:
                draw_seed = functools.partial(derive_seed, self.seed, *place, step.number, ordinal)
                arguments = {**arguments, "draw_seed": draw_seed}
            try:
                output = step.function(_Fields(example), **arguments)
                outputs = (output,) if type(output) is dict else step.examples(output)
            except Exception as error:
                self._explain(error, step, example, index)
                raise
            if step.trims and outputs:
                self._count_trimmed(example, outputs[0])
            results += outputs
        if not results:
            self.dropped[step.name] += 1
        return results

    def _count_trimmed(self, before: Example, after: Example) -> None:
        """Count the features that a preprocessor truncated before it appended EOS."""
        for name, feature in self.output_features.items():
            if feature.add_eos and name in before and len(after[name]) <= len(before[name]):
                self.trimmed[name] += 1

    def location(self, index: int) -> str:
        return self._source.location(self.split, index)

    @contextlib.contextmanager
    def located(self, index: int) -> Iterator[None]:
        """Convert a UserError about source example `index` to a BadExample that says where it is."""
        try:
            yield
        except UserError as error:
            raise BadExample(f"{self.location(index)}: {error}") from error

    def _explain(self, error: Exception, step: "_Step", example: Example, index: int) -> None:
        """Raise an error that a user can fix; add the location to any other error."""
        if isinstance(error, _MissingField):
            raise BadExample(
                f"{self.location(index)} has no field {error.args[0]!r}, which {step.name} of task {self.name} needs. "
                f"Its fields: {', '.join(example)}."
            ) from error
        where = f"{self.location(index)} in {step.name} of task {self.name}"
        if isinstance(error, UserError):
            raise BadExample(f"{where}: {error}{_tensor_hint(*example.values())}") from error
        if isinstance(error, AttributeError) and isinstance(error.obj, dict) and error.name in _TF_DATA_METHODS:
            raise UserError(
                f"The preprocessor {step.name} of task {self.name} takes a whole tf.data dataset (it calls the method "
                f"{error.name}). Here a preprocessor takes one example, a dict: rewrite it, or {_BRIDGE}."
            ) from error
        error.add_note(where)

    def _finish(self, example: Example, index: int) -> Example:
        """Convert the output features of `example` to arrays of their dtype and rank."""
        for name, feature in self.output_features.items():
            if name not in example:
                if not feature.required:
                    continue
                raise BadExample(
                    f"{self.location(index)}: task {self.name} has the output feature {name!r}, but its preprocessors "
                    f"returned only {', '.join(example) or 'nothing'}. Add rekey, or fix output_features."
                )
            try:
                example[name] = _as_array(example[name], feature)
            except ValueError as error:
                raise BadExample(f"{self.location(index)}: feature {name!r} of task {self.name} {error}") from error
        return example


class _MissingField(KeyError):
    pass


class _Fields(dict):
    """An example that distinguishes a missing field from a KeyError raised by the preprocessor itself."""

    def __missing__(self, key: Any) -> Any:
        raise _MissingField(key)


def _as_array(value: Any, feature: Feature) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == feature.dtype and array.ndim == feature.rank:
        return array
    if array.dtype.kind in "USO":
        raise ValueError(
            f"has no token ids but {str(value)[:60]!r}. Add seqio.preprocessors.tokenize to its preprocessors."
            f"{_tensor_hint(value)}"
        )
    if array.ndim != feature.rank:
        raise ValueError(f"has {array.ndim} dimension(s) instead of {feature.rank}.")
    if array.size and not np.can_cast(array.dtype, feature.dtype, casting="same_kind"):
        raise ValueError(f"is {array.dtype} instead of {feature.dtype}.")
    converted = array.astype(feature.dtype, copy=False)
    if array.dtype.kind in "iu" and converted.dtype != array.dtype and not np.array_equal(converted, array):
        wrong = array[converted != array].flat[0]
        raise ValueError(f"has the id {wrong}, which does not fit {feature.dtype}.")
    return converted


def _tensor_hint(*values: Any) -> str:
    if not any(type(value).__module__.startswith("tensorflow") for value in values):
        return ""
    return f" A preprocessor returns TensorFlow tensors; return Python or numpy values, or {_BRIDGE}."


class _Step:
    """A preprocessor with the arguments it takes.

    Args:
      available: values for its parameters.
      number: its position among the preprocessors, for seeds.
    """

    def __init__(self, function: Preprocessor, available: Mapping[str, Any], number: int):
        self.name, self.number = name_of(function), number
        if not callable(function):
            raise UserError(f"The preprocessor {function!r} is not a function.")
        self.function = function
        parameters = _unbound_parameters(function)
        self.arguments = {name: value for name, value in available.items() if name in parameters}
        self.wants_seed, self.draws_seed = "seed" in parameters, "draw_seed" in parameters
        self.trims = getattr(_innermost(function), "appends_eos_after_trim", False)

    def examples(self, output: Any) -> Sequence[Example]:
        """Return the function's result as a list of examples."""
        if isinstance(output, _Fields):
            return [output]
        if output is None:
            return []
        if isinstance(output, Mapping):
            return [dict(output)]
        if isinstance(output, Iterable) and not isinstance(output, str | bytes):
            output = list(output)
            if all(isinstance(one, Mapping) for one in output):
                return [dict(one) for one in output]
        raise UserError(
            f"{self.name} returned a {type(output).__name__}. A preprocessor takes one example (a dict) and returns an "
            f"example, None to drop it, or several examples. For a function of a whole tf.data dataset, {_BRIDGE}."
        )


def map_over_dataset(
    fn: Preprocessor | None = None, *, num_seeds: int | None = None, num_parallel_calls: int | None = None
) -> Any:
    """Decorate a preprocessor of one example, as in seqio. Here every preprocessor is one.

    Args:
      fn: the preprocessor.
      num_seeds: 1 passes `seed`, a pair of ints below 2**31; N > 1 passes `seeds`, N such pairs.
      num_parallel_calls: accepted for seqio compatibility; no effect.
    """
    if fn is None:
        return functools.partial(map_over_dataset, num_seeds=num_seeds)
    if num_seeds is None:
        return fn
    name = "seed" if num_seeds == 1 else "seeds"

    @functools.wraps(fn)
    def with_pairs(*args: Any, seed: int, **kwargs: Any) -> Any:
        numbers = [derive_seed(seed, i) for i in range(num_seeds)]
        pairs = [(number >> 32, number & 0x7FFFFFFF) for number in numbers]
        return fn(*args, **{name: pairs[0] if num_seeds == 1 else pairs}, **kwargs)

    signature = inspect.signature(fn)
    if name not in signature.parameters:
        raise UserError(f"map_over_dataset(num_seeds={num_seeds}): {name_of(fn)} has no parameter {name!r}.")
    parameters = [one.replace(name="seed") if one.name == name else one for one in signature.parameters.values()]
    with_pairs.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_pairs


def _expanded(preprocessors: Iterable[Any], available: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the preprocessors, with composites (see `composite`) replaced by their parts."""
    for function in preprocessors:
        if not _is_composite(function):
            yield function
            continue
        parameters = [name for name in _unbound_parameters(function) if name in available]
        yield from _expanded(function(**{name: available[name] for name in parameters}), available)


def count_cacheable(preprocessors: Sequence[Any]) -> int:
    """Return the number of leading preprocessors whose results are the same in every epoch and run.

    These are the ones before CacheDatasetPlaceholder and before the first that is random, depends on the sequence
    length, joins examples, or is a composite.
    """
    for count, function in enumerate(preprocessors):
        ends = isinstance(function, CacheDatasetPlaceholder) or not callable(function) or _is_composite(function)
        if ends or {"seed", "draw_seed", "sequence_length"}.intersection(_unbound_parameters(function)):
            return count
    return len(preprocessors)


def _is_composite(function: Any) -> bool:
    return getattr(_innermost(function), "composite", False)


def _unbound_parameters(function: Any) -> list[str]:
    """Return the parameters that are not bound."""
    bound = getattr(function, "keywords", {})
    return [name for name in inspect.signature(function).parameters if name not in bound]


def _innermost(function: Any) -> Any:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return function


def name_of(function: Any) -> str:
    function = _innermost(function)
    return getattr(function, "__name__", None) or type(function).__name__
