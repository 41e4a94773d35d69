"""Running a configured function, and what to say when that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from gin import config
from gin import utils as gin_utils

from t5x.configuration import session as sessions
from t5x.configuration import signatures
from t5x.configuration.errors import suggestion
from t5x.configuration.names import entry_point
from t5x.configuration.printing import selector_text
from t5x.errors import UserError

_CALL = re.compile(r"In call to configurable '(?P<name>[^']*)' \((?P<target>.*?)\)(?: in scope '(?P<scope>[^']*)')?$")
_MISSING = re.compile(r"(?P<function>.+)\(\) missing \d+ required [a-z-]+ arguments?: (?P<names>.+)")
_REQUIRED = re.compile(r"Required bindings for `(?P<selector>[^`]+)` not provided in config: \[(?P<names>.+)\]")


def configured(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its parameters taken from the configuration; arguments of the call come first.

    >>> configured(train)()  # doctest: +SKIP
    """
    with sessions.LOCK:
        return entry_point(fn, sessions.current()).wrapper


def user_message(exception: BaseException) -> str | None:
    """What to tell the user about an exception, without the text that gin adds to it.

    Returns:
      The message of a `UserError`; for a parameter that neither gin nor the caller gave, which one of which
      configurable. None for anything else: that is not the user's to mend, and a traceback tells more.
    """
    root, calls = _unwrap(exception)
    if isinstance(root, UserError):
        return str(root)
    if isinstance(root, TypeError) and calls:
        return _missing_arguments(str(root), *calls[0])
    if isinstance(root, RuntimeError):
        match = _REQUIRED.match(str(root))
        if match:
            configurable = config._REGISTRY.get_match(match["selector"])
            return _no_binding(configurable, re.findall(r"'(\w+)'", match["names"]), "")
    return None


def root_cause(exception: BaseException) -> BaseException:
    """The exception as it was raised, without what gin wrapped around it."""
    return _unwrap(exception)[0]


def _unwrap(exception: BaseException) -> tuple[BaseException, list[tuple[config.Configurable, str]]]:
    """The exception that was raised first, and the (configurable, scope) of the calls it passed, innermost first."""
    calls: list[tuple[config.Configurable, str]] = []
    while _is_proxy(exception):
        inner = exception.__getattr__("with_traceback").__self__
        added = str(exception).removeprefix(str(inner))
        calls[:0] = _calls_in(added)
        exception = inner
    return exception, calls


def _is_proxy(exception: BaseException) -> bool:
    """Whether gin made this exception to add text to another one: a class made inside one of gin's functions."""
    return getattr(type(exception).__init__, "__module__", None) == gin_utils.__name__


def _calls_in(added: str) -> Iterator[tuple[config.Configurable, str]]:
    for line in added.splitlines():
        match = _CALL.search(line)
        if match:
            for _, configurable in config._REGISTRY.items():
                if configurable.name == match["name"] and str(configurable.wrapped) == match["target"]:
                    yield configurable, match["scope"] or ""


def _missing_arguments(message: str, configurable: config.Configurable, scope: str) -> str | None:
    match = _MISSING.match(message)
    if match is None or match["function"] != signatures.constructor_name(configurable):
        return None
    if sessions.is_macro(configurable):
        near = suggestion(scope, sessions.macro_names())
        return f"The macro %{scope} is used but never set. Give it with --gin.{scope}=…{near}"
    return _no_binding(configurable, re.findall(r"'(\w+)'", match["names"]), scope)


def _no_binding(configurable: config.Configurable, names: list[str], scope: str) -> str:
    selector = sessions.scoped(scope, selector_text(configurable))
    each = "\n".join(f"    {selector}.{name} = …" for name in names)
    some = "a required parameter has" if len(names) == 1 else f"{len(names)} required parameters have"
    return f"`{selector}`: {some} no binding. Add to a gin file:\n{each}"
