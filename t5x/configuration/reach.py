"""What an entry function makes use of: every configurable, binding and macro that its bindings lead to."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from gin import config

from t5x.configuration import session as sessions
from t5x.configuration.session import BindingKey


@dataclasses.dataclass(frozen=True)
class Use:
    """A configurable as it will be called in a scope.

    Attributes:
      bound: parameter -> (value, key of the binding).
      by_gin: whether gin makes the call, with nothing but the bindings as arguments.
    """

    configurable: config.Configurable
    scope: tuple[str, ...]
    bound: dict[str, tuple[Any, BindingKey]]
    by_gin: bool


@dataclasses.dataclass
class Reach:
    """Everything an entry function leads to.

    Attributes:
      uses: configurables, macros among them (as `gin.macro` in the scope that is their name).
      circles: chains of names where a value is needed to make itself.
    """

    uses: list[Use] = dataclasses.field(default_factory=list)
    circles: list[list[str]] = dataclasses.field(default_factory=list)

    def keys(self) -> set[BindingKey]:
        """The bindings that have an effect."""
        return {key for use in self.uses for _, key in use.bound.values()}


def reach(entry: config.Configurable) -> Reach:
    """Follows the bindings of `entry`, and of what Python code registered itself and may call anywhere."""
    walker = _Walker()
    walker.visit(entry, (), by_gin=True, path=())
    walker.visit_all(lambda configurable: configurable.import_source is None and configurable.module != "gin")
    return walker.found


def reach_everything() -> Reach:
    """Follows every binding there is."""
    walker = _Walker()
    walker.visit_all(lambda configurable: True)
    return walker.found


class _Walker:
    def __init__(self):
        self.found = Reach()
        self._seen: set[tuple[str, tuple[str, ...], bool]] = set()

    def visit_all(self, wanted: Callable[[config.Configurable], bool]) -> None:
        for scope, selector in list(config._CONFIG):
            if wanted(config._REGISTRY[selector]):
                scopes = tuple(scope.split("/")) if scope else ()
                self.visit(config._REGISTRY[selector], scopes, by_gin=False, path=())

    def visit(self, configurable: config.Configurable, scope: tuple[str, ...], by_gin: bool, path: tuple) -> None:
        here = (configurable.selector, scope)
        if by_gin and here in path:
            self.found.circles.append([_label(*step) for step in (*path[path.index(here) :], here)])
            return
        if (*here, by_gin) in self._seen:
            return
        self._seen.add((*here, by_gin))
        values = sessions.bound(configurable.selector, scope)
        bound = {name: (value, (at, configurable.selector, name)) for name, (value, at) in values.items()}
        self.found.uses.append(Use(configurable, scope, bound, by_gin))
        for value, _ in bound.values():
            for reference in sessions.references_in(value):
                deeper = (*path, here) if by_gin and reference.evaluate else ()
                within = tuple(reference.scopes) or scope
                self.visit(reference.configurable, within, reference.evaluate, deeper)
        if inspect.isclass(configurable.wrapped):
            for _, method in list(config._REGISTRY.items()):
                if method.is_method and method.module == configurable.selector:
                    self.visit(method, scope, by_gin=False, path=())


def _label(selector: str, scope: tuple[str, ...]) -> str:
    return f"%{'/'.join(scope)}" if selector == sessions.MACRO else f"@{selector}()"
