"""What has been parsed so far, beside what gin itself keeps: imports, names, places of bindings, registrations."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gin import config, config_parser

from t5x.configuration.errors import Origin

LOCK = threading.RLock()

BindingKey = tuple[str, str, str]  # scope, complete selector, parameter
MACRO = "gin.macro"


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A name that an import statement made, and what it stands for."""

    value: Any
    statement: config_parser.ImportStatement


@dataclasses.dataclass
class Registration:
    """A configurable that we registered with gin, and what had its place before."""

    target: Any
    selector: str
    previous: config.Configurable | None
    previous_of_target: config.Configurable | None


@dataclasses.dataclass
class Session:
    """State of one configuration, from the first `parse` to `clear`."""

    entry_points: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    announced: set[str] = dataclasses.field(default_factory=set)
    namespaces: dict[str, Any] = dataclasses.field(default_factory=dict)
    dynamic: bool = False
    imports: list[config_parser.ImportStatement] = dataclasses.field(default_factory=list)
    symbols: dict[str, Symbol] = dataclasses.field(default_factory=dict)
    origins: dict[BindingKey, Origin] = dataclasses.field(default_factory=dict)
    references: list[config.ConfigurableReference] = dataclasses.field(default_factory=list)
    registrations: list[Registration] = dataclasses.field(default_factory=list)

    def bind(self, key: BindingKey, value: Any, origin: Origin) -> None:
        scope, selector, parameter = key
        config._CONFIG.setdefault((scope, selector), {})[parameter] = value
        self.origins[key] = origin

    def provenance(self, key: BindingKey) -> str:
        """`file:line` or the argument that made the binding (the last one, which holds)."""
        return str(self.origins[key]) if key in self.origins else "set from Python"

    def register(self, target: Any, *, name: str, module: str, import_source: Any, **lists: Any) -> config.Configurable:
        """Makes `target` configurable as `module.name`, so that `clear` can undo it."""
        selector = f"{module}.{name}"
        entry = Registration(target, selector, config._REGISTRY.get(selector), config._INVERSE_REGISTRY.get(target))
        config._make_configurable(
            target, name=name, module=module, import_source=import_source, avoid_class_mutation=True, **lists
        )
        self.registrations.append(entry)
        return config._INVERSE_REGISTRY[target]


_session = Session()


def current() -> Session:
    return _session


def begin(entry_points: Mapping[str, Callable[..., Any]], aliases: Mapping[str, str]) -> Session:
    """The current session, with more entry points and aliases."""
    _session.entry_points.update(entry_points)
    _session.aliases.update(aliases)
    return _session


def snapshot() -> tuple[dict, dict[str, Any]]:
    """What `restore` needs to undo the bindings and imports that follow."""
    bindings = {key: dict(value) for key, value in config._CONFIG.items()}
    return bindings, {
        "dynamic": _session.dynamic,
        "imports": list(_session.imports),
        "symbols": dict(_session.symbols),
        "origins": dict(_session.origins),
    }


def restore(saved: tuple[dict, dict[str, Any]]) -> None:
    """Undoes the bindings and imports made since `saved` was taken."""
    bindings, fields = saved
    config._CONFIG.clear()
    config._CONFIG.update(bindings)
    for name, value in fields.items():
        setattr(_session, name, value)


def clear() -> None:
    """Forgets every binding, import and name, as if nothing had been parsed; names that modules registered stay."""
    global _session
    with LOCK:
        config.clear_config()
        for entry in reversed(_session.registrations):
            if entry.selector in config._REGISTRY:
                config._REGISTRY.pop(entry.selector)
            if entry.previous is not None:
                config._REGISTRY[entry.selector] = entry.previous
            if entry.previous_of_target is not None:
                config._INVERSE_REGISTRY[entry.target] = entry.previous_of_target
            else:
                config._INVERSE_REGISTRY.pop(entry.target, None)
        _session = Session()


def is_macro(configurable: config.Configurable) -> bool:
    return configurable.wrapped is config.macro


def is_constant(configurable: config.Configurable) -> bool:
    return configurable.wrapped is config._retrieve_constant


def is_required(value: Any) -> bool:
    """Whether `value` is `%gin.REQUIRED`."""
    return (
        isinstance(value, config.ConfigurableReference)
        and is_constant(value.configurable)
        and config._CONSTANTS.get("/".join(value.scopes)) is config.REQUIRED
    )


def bound(selector: str, scope: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """Parameters bound for a call in `scope`: name -> (value, scope of the binding that holds)."""
    values: dict[str, tuple[Any, str]] = {}
    for depth in range(len(scope) + 1):
        at = "/".join(scope[:depth])
        values.update({name: (value, at) for name, value in config._CONFIG.get((at, selector), {}).items()})
    return values


def macro_names() -> list[str]:
    return sorted(scope for scope, selector in config._CONFIG if selector == MACRO)


def scoped(scope: str, selector: str) -> str:
    """`scope/selector`; without the scope that gin opens while it evaluates a macro, which nobody writes."""
    return selector if not scope or (scope, MACRO) in config._CONFIG else f"{scope}/{selector}"


def references_in(value: Any) -> Iterator[config.ConfigurableReference]:
    """Every reference in a value, keys of dicts included."""
    if isinstance(value, config.ConfigurableReference):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from references_in(key)
            yield from references_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references_in(item)
