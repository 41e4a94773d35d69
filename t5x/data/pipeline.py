"""From a source example to finished examples: a pure function of (seed, epoch, index)."""

import collections
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x.data.features import Feature
from t5x.data.sources import BadExample, DataSource
from t5x.errors import UserError

Example = dict[str, Any]
Preprocessor = Callable[..., Example | Iterable[Example] | None]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit number that depends on all parts and on nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Pipeline:
    """The examples of one split of a task, ready for a feature converter.

    Args:
      name: of the task, for messages.
      source, split: where examples come from.
      preprocessors: applied in order. Each gets an example and returns one, None (which drops it) or several. The
        keyword arguments `output_features`, `sequence_length` and `seed` are passed to those that have such a
        parameter, unless it is bound already; `seed` differs for every (epoch, example, preprocessor).
      output_features: what finished examples must have. Other features are left as they are.
      sequence_length: {feature: length} for preprocessors, or None.
      seed: of everything random in preprocessors.
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
    ):
        source.check_split(split)
        for feature in output_features.values():
            feature.vocabulary.vocab_size  # noqa: B018 - reads its file now, so that a missing one is no data error
        self.name = name
        self.split = split
        self.seed = seed
        self.output_features = output_features
        self.dropped: collections.Counter[str] = collections.Counter()
        self._source = source
        known = {"output_features": output_features, "sequence_length": sequence_length}
        self._steps = [_Step(function, known) for function in preprocessors]

    def __len__(self) -> int:
        """Number of source examples; what the preprocessors make of them may be more or fewer."""
        return self._source.num_examples(self.split)

    def outputs(self, epoch: int, index: int) -> list[Example]:
        """The finished examples that source example `index` becomes in `epoch`: none, one or several."""
        examples = [self._source.example(self.split, index)]
        for at, step in enumerate(self._steps):
            made = []
            for ordinal, example in enumerate(examples):
                seed = derive_seed(self.seed, epoch, index, at, ordinal) if step.wants_seed else 0
                made += self._apply(step, example, seed, index)
            examples = made
            if not examples:
                self.dropped[step.name] += 1
                return []
        return [self._finish(example, index) for example in examples]

    def location(self, index: int) -> str:
        return self._source.location(self.split, index)

    def _apply(self, step: "_Step", example: Example, seed: int, index: int) -> list[Example]:
        fields = ", ".join(example)
        try:
            return step(_Fields(example), seed)
        except _MissingField as error:
            raise BadExample(
                f"{self.location(index)} has no field {error.args[0]!r}, which {step.name} of task {self.name} asks "
                f"for. Its fields are {fields}."
            ) from error
        except UserError as error:
            raise BadExample(f"{self._where(step, index)}: {error}") from error
        except Exception as error:
            error.add_note(self._where(step, index))
            raise

    def _where(self, step: "_Step", index: int) -> str:
        return f"{self.location(index)} in {step.name} of task {self.name}"

    def _finish(self, example: Example, index: int) -> Example:
        """`example` with its output features as arrays of the promised dtype and rank."""
        for name, feature in self.output_features.items():
            if name not in example:
                if not feature.required:
                    continue
                raise BadExample(
                    f"{self.location(index)}: task {self.name} promises the feature {name!r}, but its preprocessors "
                    f"made only {', '.join(example) or 'nothing'}. Add rekey, or mend output_features."
                )
            try:
                example[name] = _as_array(example[name], feature)
            except ValueError as error:
                raise BadExample(f"{self.location(index)}: feature {name!r} of task {self.name} {error}") from error
        return example


class _MissingField(KeyError):
    pass


class _Fields(dict):
    """An example that tells a missing field from a KeyError of the preprocessor's own."""

    def __missing__(self, key: Any) -> Any:
        raise _MissingField(key)


def _as_array(value: Any, feature: Feature) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "USO":
        raise ValueError(f"is not ids but {str(value)[:60]!r}. Add seqio.preprocessors.tokenize to its preprocessors.")
    if array.ndim != feature.rank:
        raise ValueError(f"has {array.ndim} dimension(s) where {feature.rank} is promised.")
    if array.size and not np.can_cast(array.dtype, feature.dtype, casting="same_kind"):
        raise ValueError(f"is {array.dtype} where {feature.dtype} is promised.")
    return array.astype(feature.dtype, copy=False)


class _Step:
    """A preprocessor with the arguments it asks for."""

    def __init__(self, function: Preprocessor, known: Mapping[str, Any]):
        self.name = _name_of(function)
        if not callable(function):
            raise UserError(f"The preprocessor {function!r} is not a function.")
        self._function = function
        bound = getattr(function, "keywords", {})
        wanted = [p for p in inspect.signature(function).parameters if p not in bound]
        self._arguments = {name: value for name, value in known.items() if name in wanted}
        self.wants_seed = "seed" in wanted

    def __call__(self, example: Example, seed: int) -> list[Example]:
        arguments = self._arguments | {"seed": seed} if self.wants_seed else self._arguments
        made = self._function(example, **arguments)
        if made is None:
            return []
        if isinstance(made, Mapping):
            return [dict(made)]
        if isinstance(made, Iterable) and not isinstance(made, str | bytes):
            made = list(made)
            if all(isinstance(one, Mapping) for one in made):
                return [dict(one) for one in made]
        raise UserError(
            f"{self.name} returned a {type(made).__name__}. A preprocessor takes one example (a dict) and returns an "
            "example, None to drop it, or several examples; functions of a whole tf.data dataset do not work here."
        )


def _name_of(function: Any) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__
