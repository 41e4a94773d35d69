"""The current configuration: what gin files imported and named, and where each value comes from.

Gin itself holds the values.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gin
from gin import config
from gin.config_parser import ImportStatement

from t5x._runtime.errors import ArgumentError, display_path
from t5x.configuration.values import MACRO, ParsedReference, map_value


class ConfigurationError(ArgumentError):
    """The gin files or the `--gin.…` arguments are wrong or incomplete."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The line of a gin file, or the command-line argument, that a statement comes from.

    Attributes:
      path: the gin file; None for an argument.
      line: line number in the file.
      text: the line, or the argument as the user typed it.
      unquoted: whether the argument is a string without quotes, which gin itself does not accept.
    """

    path: str | None
    line: int
    text: str
    unquoted: bool = False

    def __str__(self) -> str:
        return self.text if self.path is None else f"{display_path(self.path)}:{self.line}"

    def describe(self, problem: object) -> str:
        """Return the problem with its place, followed by the line itself."""
        line = "" if self.path is None or not self.text.strip() else f"\n    {self.text.strip()}"
        return f"{self}: {problem}{line}"


def combine_errors(problems: Sequence[str], headline: str) -> ConfigurationError:
    """Return one error that lists all `problems`; a single problem gets no headline."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return ConfigurationError(unique[0])
    body = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in unique)
    return ConfigurationError(f"{headline} ({len(unique)} problems):\n{body}")


Key = tuple[str, str, str]  # scope, complete selector, parameter


class Import(NamedTuple):
    """An import statement, and the module that its name stands for."""

    statement: ImportStatement
    module: Any


@dataclasses.dataclass
class State:
    """Everything read between two calls of `clear`, except the values.

    Attributes:
      entry_points: functions that `import __main__` offers, by name.
      stand_ins: packages whose imports mean another module, and that module.
      dynamic: whether any file uses dynamic registration.
      imports: all imports, in order.
      sources: how to name a configurable: its import, and its path in that module.
      origins: where a value was bound last.
    """

    entry_points: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    stand_ins: dict[str, str] = dataclasses.field(default_factory=dict)
    dynamic: bool = False
    imports: list[Import] = dataclasses.field(default_factory=list)
    sources: dict[str, tuple[ImportStatement, str]] = dataclasses.field(default_factory=dict)
    origins: dict[Key, Origin] = dataclasses.field(default_factory=dict)

    def copy(self) -> "State":
        return State(**{name: copy.copy(value) for name, value in vars(self).items()})

    def origin(self, key: Key) -> Origin:
        return self.origins.get(key, Origin(None, 0, "Python code"))


_state = State()


def current() -> State:
    return _state


def commit(state: State, values: Mapping[Key, Any]) -> None:
    """Make `state` the current one, and bind `values`."""
    global _state
    _state = state
    with gin.unlock_config():
        for key, value in values.items():
            gin.bind_parameter(key, map_value(value, _reference))


def _reference(leaf: Any) -> Any:
    return config.ConfigurableReference(leaf.name, leaf.evaluate) if isinstance(leaf, ParsedReference) else leaf


def clear() -> None:
    """Forget all values and imports, as if nothing had been parsed."""
    global _state
    gin.clear_config()
    _state = State()


def bindings() -> Iterator[tuple[Key, Any]]:
    """Yield all bound values, including those that Python code bound with gin.

    They are read from a private name of gin, which has no public list of them.
    """
    for (scope, selector), values in list(config._CONFIG.items()):
        for parameter, value in list(values.items()):
            yield (scope, selector, parameter), value


def bound(selector: str, scope: tuple[str, ...]) -> dict[str, tuple[Any, Key]]:
    """Return the parameters bound for a call in `scope`: name -> (value, key)."""
    parameters: dict[str, tuple[Any, Key]] = {}
    for depth in range(len(scope) + 1):
        outer = "/".join(scope[:depth])
        values = config._CONFIG.get((outer, selector), {})
        parameters.update({name: (value, (outer, selector, name)) for name, value in values.items()})
    return parameters


def macro_value(name: str) -> tuple[Any, Key] | None:
    """Return the value of a macro and its key, or None if it is not defined."""
    return bound(MACRO, tuple(name.split("/"))).get("value")
