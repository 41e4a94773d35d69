"""The base class of sources, and the source made from a Python function."""

import abc
import copy
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data import example_encoding
from t5x.data.content_hashes import fingerprint

_HASHED_EXAMPLES = 10_000
_HASHED_IN_MEMORY = 1_000_000


class BadExample(UserError):
    """An example that cannot be used; the message names it and the reason."""


class MalformedRecord(Exception):
    """The reason why a record is invalid; the caller adds its location."""


class DataSource(abc.ABC):
    """Examples by split and index. A returned example belongs to the caller, who may change it.

    Subclass it for sources of your own. To be read by worker processes, a source must be picklable.
    """

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]: ...

    @abc.abstractmethod
    def num_examples(self, split: str) -> int: ...

    @abc.abstractmethod
    def example(self, split: str, index: int) -> dict[str, Any]:
        """Return example `index` (0 to num_examples - 1) of a split."""

    @abc.abstractmethod
    def location(self, split: str, index: int) -> str:
        """Return where an example is, for messages: file:line if possible."""

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Return what identifies the examples of a split, JSON-serializable; a task's cache depends on it.

        By default this is a hash of the code of the class and of the pickled state. Override it in a subclass whose
        examples can change while these do not.
        """
        return {"class": type(self).__qualname__, "settings": fingerprint(self)}

    def content_fingerprint(self, split: str) -> Callable[[], dict[str, Any]]:
        """Return a function that computes what identifies the content of a split, wherever it is stored, as JSON.

        A checkpoint's position in the data is valid only for this content. By default this is a hash of the examples,
        or of 10,000 of them, evenly spaced, if there are more. Slow work belongs in the returned function, which runs
        in a thread while examples are read.
        """
        content = self._hash_examples(split, _HASHED_EXAMPLES)
        return lambda: content

    def content_bytes(self, split: str) -> int:
        """Return the number of bytes in files that `content_fingerprint` covers."""
        return 0

    def _hash_examples(self, split: str, limit: int) -> dict[str, Any]:
        size = self.num_examples(split)
        digest = hashlib.blake2b(digest_size=16)
        for index in range(size) if size <= limit else (i * size // limit for i in range(limit)):
            digest.update(self._example_bytes(split, index))
        return {"class": type(self).__qualname__, "examples": size, "content": digest.hexdigest()}

    def _example_bytes(self, split: str, index: int) -> bytes:
        try:
            example = self.example(split, index)
        except BadExample:
            return b"bad"
        try:
            return example_encoding.encode([dict(sorted(example.items(), key=str))])
        except UserError:  # values of other types
            return fingerprint(example, lasting=True).encode()

    def check_split(self, split: str) -> None:
        if split not in self.splits:
            raise UserError(f"There is no split {split!r} (splits: {', '.join(map(repr, self.splits))}).")


class OpenedSplits(DataSource):
    """State that a source opens for each split on first use; it is not pickled."""

    def __init__(self):
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        OpenedSplits.__init__(self)

    def opened(self, split: str) -> Any:
        """Return the result of `_open(split)`, which is called on first use."""
        if split not in self._opened:
            with self._lock:
                if split not in self._opened:
                    self.check_split(split)
                    self._opened[split] = self._open(split)
        return self._opened[split]

    @abc.abstractmethod
    def _open(self, split: str) -> Any: ...


class FunctionDataSource(OpenedSplits, DataSource):
    """Examples from a Python function.

        >>> source = FunctionDataSource(lambda split: [{"inputs": "2 + 2", "targets": "4"}], splits=("train",))
        >>> source.example("train", 0)
        {'inputs': '2 + 2', 'targets': '4'}

    Args:
      dataset_fn: `dataset_fn(split)` returns a sequence of dicts (anything with `len` and indexing). A parameter
        `shuffle_files` without a default, as in seqio, gets False.
      splits: the splits that it supports.
      num_input_examples: accepted for seqio compatibility; the sequence is counted.
    """

    def __init__(
        self,
        dataset_fn: Callable[..., Sequence[Mapping[str, Any]]],
        splits: Iterable[str],
        num_input_examples: Mapping[str, int] | None = None,
    ):
        super().__init__()
        self._function = dataset_fn
        self._splits = tuple(splits)

    @property
    def splits(self) -> tuple[str, ...]:
        return self._splits

    def num_examples(self, split: str) -> int:
        return len(self.opened(split))

    def example(self, split: str, index: int) -> dict[str, Any]:
        return as_example(copy_mutable(self.opened(split)[index]), lambda: self.location(split, index))

    def location(self, split: str, index: int) -> str:
        return f"example {index} of {name_of(self._function)}({split!r})"

    def content_fingerprint(self, split: str) -> Callable[[], dict[str, Any]]:
        """See `DataSource`; up to a million examples of a list or tuple are hashed."""
        if not isinstance(self.opened(split), list | tuple):
            return super().content_fingerprint(split)
        return functools.partial(self._hash_examples, split, _HASHED_IN_MEMORY)

    def _open(self, split: str) -> Sequence[Mapping[str, Any]]:
        parameters = inspect.signature(self._function).parameters
        takes_flag = "shuffle_files" in parameters and parameters["shuffle_files"].default is inspect.Parameter.empty
        sequence = self._function(split, **({"shuffle_files": False} if takes_flag else {}))
        check_sequence(sequence, f"{name_of(self._function)}({split!r})")
        if not len(sequence):
            raise UserError(f"{name_of(self._function)}({split!r}) returned no examples.")
        return sequence


def as_example(example: Any, location: Callable[[], str]) -> dict[str, Any]:
    """Return a new dict of a user function's example; raise BadExample if it is not a mapping."""
    if not isinstance(example, Mapping):
        raise BadExample(f"{location()} is a {type(example).__name__}. Examples must be dicts.")
    return dict(example)


def copy_mutable(example: Any) -> Any:
    """Return an example of a user's sequence with copies of its mutable values."""
    if not isinstance(example, Mapping):
        return example
    mutable = list | dict | np.ndarray
    return {name: copy.deepcopy(value) if isinstance(value, mutable) else value for name, value in example.items()}


def check_sequence(sequence: Any, call: str) -> None:
    if not (hasattr(sequence, "__len__") and hasattr(sequence, "__getitem__")):
        raise UserError(
            f"{call} returned a {type(sequence).__name__}. Return a sequence of dicts with len() and indexing, such as "
            "a list, so that training can resume anywhere."
        )


def name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
