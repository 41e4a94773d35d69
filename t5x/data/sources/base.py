"""What a source is, and the one made of a Python function."""

import abc
import copy
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x.data.fingerprints import fingerprint
from t5x.errors import UserError


class BadExample(UserError):
    """One example cannot be used; the message says which one and why."""


class Malformed(Exception):
    """What is wrong with a record, without where it is: that is added by who knows it."""


class DataSource(abc.ABC):
    """Examples by split and index. Examples handed out belong to the caller, who may change them.

    A subclass of your own is a source like any other. To be read by worker processes it must be picklable.
    """

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]: ...

    @abc.abstractmethod
    def num_examples(self, split: str) -> int: ...

    @abc.abstractmethod
    def example(self, split: str, index: int) -> dict[str, Any]:
        """Example `index` (0 to num_examples - 1) of a split."""

    @abc.abstractmethod
    def location(self, split: str, index: int) -> str:
        """Where an example is, for messages: file:line where there is one."""

    def fingerprint(self, split: str) -> dict[str, Any]:
        """What tells the examples of a split from others, JSON-able; a cache of a task is of one of these.

        Here it is a hash of the code of the class and of what a pickle of the source holds. A subclass whose examples
        may change while these do not says more.
        """
        return {"class": type(self).__qualname__, "settings": fingerprint(self)}

    def check_split(self, split: str) -> None:
        if split not in self.splits:
            raise UserError(f"There is no split {split!r}. There is {', '.join(map(repr, self.splits))}.")


class OpenedSplits(abc.ABC):
    """What a source keeps of each split once it is asked for; it is left behind when the source is pickled."""

    def __init__(self):
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        OpenedSplits.__init__(self)

    def opened(self, split: str) -> Any:
        """What `_open(split)` returned, when it was first asked for."""
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
        `shuffle_files` without default, as seqio asks for, gets False.
      splits: the splits it knows.
      num_input_examples: seqio's hint; the sequence itself is counted here.
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
        return as_example(unshared(self.opened(split)[index]), lambda: self.location(split, index))

    def location(self, split: str, index: int) -> str:
        return f"example {index} of {name_of(self._function)}({split!r})"

    def _open(self, split: str) -> Sequence[Mapping[str, Any]]:
        parameters = inspect.signature(self._function).parameters
        wanted = "shuffle_files" in parameters and parameters["shuffle_files"].default is inspect.Parameter.empty
        sequence = self._function(split, **({"shuffle_files": False} if wanted else {}))
        check_sequence(sequence, f"{name_of(self._function)}({split!r})")
        if not len(sequence):
            raise UserError(f"{name_of(self._function)}({split!r}) returned no examples.")
        return sequence


def as_example(example: Any, location: Callable[[], str]) -> dict[str, Any]:
    """A new dict of what a user's function gave; BadExample if it is none."""
    if not isinstance(example, Mapping):
        raise BadExample(f"{location()} is a {type(example).__name__}; examples are dicts.")
    return dict(example)


def unshared(example: Any) -> Any:
    """An example that a user's sequence keeps, with copies of what in it can be changed in place."""
    if not isinstance(example, Mapping):
        return example
    changeable = list | dict | np.ndarray
    return {name: copy.deepcopy(one) if isinstance(one, changeable) else one for name, one in example.items()}


def check_sequence(sequence: Any, call: str) -> None:
    if not (hasattr(sequence, "__len__") and hasattr(sequence, "__getitem__")):
        raise UserError(
            f"{call} returned a {type(sequence).__name__}. Return a sequence of dicts, with len() and indexing, so "
            "that training can resume anywhere: e.g. list(...)."
        )


def name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def optional_package(module: str, package: str, purpose: str, extra: str | None = None) -> types.ModuleType:
    """Imports a module that may not be installed; a UserError says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        or_extra = f", or `pip install -e '.[{extra}]'` in the checkout of t5x" if extra else ""
        raise UserError(
            f"{purpose} needs the package {package} ({error}). `pip install {package}`{or_extra}."
        ) from error


def excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")
