"""Checks of a parsed configuration before anything runs: all that is missing or of the wrong type, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from gin import config

from t5x.configuration import annotations, signatures
from t5x.configuration import session as sessions
from t5x.configuration.errors import ConfigurationError, join_problems, suggestion
from t5x.configuration.names import entry_point
from t5x.configuration.printing import resolve, selector_text, value_text
from t5x.configuration.reach import Reach, Use, reach, reach_everything
from t5x.configuration.session import MACRO, BindingKey, Session

_logger = logging.getLogger(__name__)


def check(fn: Callable[..., Any], given: Collection[str] = ()) -> None:
    """Checks the configuration of an entry function and of all that its bindings lead to.

    An argument (`--gin.…`) that sets something nothing reads is named in a warning.

    Args:
      fn: the entry function.
      given: parameters of `fn` that the caller will pass itself, which need no binding.

    Raises:
      ConfigurationError: lists every required macro and parameter that has no value, every undefined macro, every
        value of the wrong type, and values that need themselves.
    """
    with sessions.LOCK:
        session = sessions.current()
        entry = entry_point(fn, session)
        found = reach(entry)
        problems = _problems(found, session, {entry.selector: given})
        _raise_if_any(problems, f"`{entry.name}` cannot run with this configuration")
        _tell_of_arguments_without_effect(found, session)


def check_everything() -> None:
    """The same checks for every binding there is, where no entry function is known."""
    with sessions.LOCK:
        _raise_if_any(_problems(reach_everything(), sessions.current(), {}), "The configuration is not complete")


def _problems(found: Reach, session: Session, given: Mapping[str, Collection[str]]) -> list[str]:
    return [
        *_required(found, session),
        *_unbound(found, given),
        *_undefined_macros(session),
        *_circles(found),
        *_wrong_types(found, session),
    ]


def _raise_if_any(problems: list[str], headline: str) -> None:
    if problems:
        raise join_problems(problems, headline)


def _required(found: Reach, session: Session) -> Iterator[str]:
    """Bindings that still are `%gin.REQUIRED`."""
    for use in found.uses:
        for value, key in use.bound.values():
            if any(map(sessions.is_required, sessions.references_in(value))):
                name = key_text(key)
                yield f"{name} is required ({session.provenance(key)}) and not given. Give it: --gin.{name}=…"


def _unbound(found: Reach, given: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Parameters without a default that nothing sets, of calls that gin makes."""
    for use in found.uses:
        if not use.by_gin or use.configurable.module == "gin":
            continue
        known = {*use.bound, *given.get(use.configurable.selector, ())}
        missing = [name for name in signatures.needed(use.configurable) if name not in known]
        if missing:
            selector = sessions.scoped("/".join(use.scope), selector_text(use.configurable))
            bindings = "\n".join(f"    {selector}.{name} = …" for name in missing)
            yield f"`{selector}` needs {', '.join(f'`{m}`' for m in missing)}, not bound anywhere. Bind:\n{bindings}"


def _undefined_macros(session: Session) -> Iterator[str]:
    for (scope, selector), values in list(config._CONFIG.items()):
        for parameter, value in values.items():
            for reference in sessions.references_in(value):
                if not sessions.is_macro(reference.configurable) or sessions.bound(MACRO, tuple(reference.scopes)):
                    continue
                name = "/".join(reference.scopes)
                place = session.provenance((scope, selector, parameter))
                near = suggestion(name, sessions.macro_names(), prefix=" Nearest macros: ")
                yield f"{place}: the macro %{name} is never set. Give it: --gin.{name}=…{near}"


def _circles(found: Reach) -> Iterator[str]:
    for chain in found.circles:
        yield f"a value is needed to make itself: {' -> '.join(chain)}."


def _wrong_types(found: Reach, session: Session) -> Iterator[str]:
    for use in found.uses:
        parameters, _ = signatures.bindable(use.configurable)
        for name, (value, key) in use.bound.items():
            if name in parameters and not _incomplete(resolve(value)):
                yield from _wrong_type(use, key, parameters[name], value, session)


def _wrong_type(use: Use, key: BindingKey, parameter: Any, value: Any, session: Session) -> Iterator[str]:
    annotation = signatures.annotation(use.configurable, parameter)
    resolved = resolve(value)
    if annotations.accepts(parameter, annotation, resolved):
        return
    source = _last_macro(value)
    place = session.provenance(source or key)
    through = f" (through %{source[0]}, bound at {session.provenance(key)})" if source else ""
    yield (
        f"{place}: `{key_text(key)}`{through} expects {annotations.describe(parameter, annotation)}, "
        f"got {value_text(resolved)}.{annotations.hint(annotation, resolved)}"
    )


def _last_macro(value: Any) -> BindingKey | None:
    """The key of the macro that finally holds the value, where the value is a macro or a chain of them."""
    key = None
    while isinstance(value, config.ConfigurableReference) and sessions.is_macro(value.configurable):
        value, scope = sessions.bound(MACRO, tuple(value.scopes))["value"]
        key = (scope, MACRO, "value")
    return key


def _incomplete(resolved: Any) -> bool:
    """Whether constants, or macros that could not be replaced, are left in a value: those are reported elsewhere."""
    references = sessions.references_in(resolved)
    return any(sessions.is_macro(r.configurable) or sessions.is_constant(r.configurable) for r in references)


def _tell_of_arguments_without_effect(found: Reach, session: Session) -> None:
    effective = found.keys()
    values = [value for values in config._CONFIG.values() for value in values.values()]
    references = [reference for value in values for reference in sessions.references_in(value)]
    mentioned = {"/".join(r.scopes) for r in references if sessions.is_macro(r.configurable)}
    for key, origin in session.origins.items():
        if not origin.from_argument or key in effective:
            continue
        read = [key_text(k) for k in effective if (k[1] == MACRO) == (key[1] == MACRO)]
        near = suggestion(key_text(key), read)
        message = f"{origin} has no effect: nothing in this run reads {key_text(key)}.{near}"
        if key[1] == MACRO and key[0] not in mentioned:  # a slip of the hand: the run that was meant is another one
            raise ConfigurationError(message)
        _logger.warning("%s", message)


def key_text(key: BindingKey) -> str:
    """The left side of a binding as one would write it: a macro's name, or `scope/selector.parameter`."""
    scope, selector, parameter = key
    if selector == MACRO:
        return scope
    return f"{scope}/" * bool(scope) + f"{selector_text(config._REGISTRY[selector])}.{parameter}"
