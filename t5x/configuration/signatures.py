"""What parameters a configurable has: names, annotations, defaults, and which of them a call cannot do without."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from gin import config

from t5x.configuration.errors import nearest


def _called(configurable: config.Configurable) -> Callable[..., Any]:
    """The function that takes the parameters: of a class, its constructor."""
    wrapped = configurable.wrapped
    return config._find_class_construction_fn(wrapped) if inspect.isclass(wrapped) else wrapped


def _parameters(configurable: config.Configurable, function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Parameters of `function` without `self`, or None where Python cannot tell."""
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None
    if inspect.isclass(configurable.wrapped) or configurable.is_method:
        named = parameters[:1] and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
        parameters = parameters[1:] if named else parameters
    return parameters


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def bindable(configurable: config.Configurable) -> tuple[dict[str, inspect.Parameter], bool]:
    """Parameters that gin can set, by name, and whether any other name is taken as well (`**kwargs`)."""
    parameters = _parameters(configurable, _innermost(_called(configurable)))
    if parameters is None:
        return {}, True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name: p for p in parameters if p.kind in kinds}
    if configurable.allowlist:
        named = {name: p for name, p in named.items() if name in configurable.allowlist}
    named = {name: p for name, p in named.items() if name not in (configurable.denylist or ())}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return named, open_ended and not configurable.allowlist


def needed(configurable: config.Configurable) -> list[str]:
    """Parameters without a default: a call that gives no arguments of its own fails unless gin sets them."""
    wrapped = configurable.wrapped
    if inspect.isclass(wrapped) and type(wrapped).__call__ is not type.__call__:
        return []
    function = _called(configurable)
    if getattr(function, "__globals__", {}).get("__name__") == config.__name__:
        function = function.__wrapped__
    needs = []
    for parameter in _parameters(configurable, function) or []:
        variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if not variadic and (parameter.default is inspect.Parameter.empty or parameter.default is config.REQUIRED):
            needs.append(parameter.name)
    return needs


def constructor_name(configurable: config.Configurable) -> str:
    """The name by which Python's own messages call the function that takes the parameters."""
    return getattr(_innermost(_called(configurable)), "__qualname__", configurable.name)


def annotation(configurable: config.Configurable, parameter: inspect.Parameter) -> Any:
    """The annotation of `parameter` with names in strings looked up; `typing.Any` where that fails."""
    found = parameter.annotation
    if found is inspect.Parameter.empty:
        return found
    try:
        return _hints(configurable, parameter)
    except Exception:  # whatever a user's annotation raises when it is evaluated, it cannot be checked against
        return Any


def _hints(configurable: config.Configurable, parameter: inspect.Parameter) -> Any:
    if not _mentions_string(parameter.annotation):
        return parameter.annotation
    function = _innermost(_called(configurable))
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=function.__globals__, include_extras=True)[parameter.name]
    except NameError:
        return typing.get_type_hints(configurable.wrapped, include_extras=True)[parameter.name]


def _mentions_string(annotation_: Any) -> bool:
    return isinstance(annotation_, (str, typing.ForwardRef)) or any(map(_mentions_string, typing.get_args(annotation_)))


def describe_parameters(configurable: config.Configurable, wanted: str) -> str:
    """The parameters there are, those most like `wanted` first."""
    names = list(bindable(configurable)[0])
    if not names:
        return "It has no parameters that gin can set."
    near = nearest(wanted, names)
    return "It has: " + ", ".join([*near, *(name for name in names if name not in near)]) + "."
