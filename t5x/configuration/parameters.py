"""Parameters of configurables, and whether a gin value fits their annotations."""

import collections.abc
import inspect
import types
import typing
from typing import Any

from gin import config

_PLAIN = {bool: (bool, int), int: (int,), float: (int, float), str: (str,), bytes: (bytes,)}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (list, tuple, set, frozenset, collections.abc.MutableSequence, collections.abc.Set)
_STRINGS = (collections.abc.Iterable, collections.abc.Collection, collections.abc.Sequence)  # a string is one of these


def parameters_of(configurable: config.Configurable, follow_wrapped: bool = True) -> dict[str, inspect.Parameter]:
    """Return the parameters that gin can bind, by name.

    Args:
      follow_wrapped: whether to return those of a decorated function rather than those of its decorator.
    """
    function = configurable.wrapped
    is_class = inspect.isclass(function)
    if is_class:
        function = function.__new__ if function.__init__ is object.__init__ else function.__init__
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped, eval_str=True)
    except Exception:  # an annotation that cannot be evaluated
        try:
            signature = inspect.signature(function, follow_wrapped=follow_wrapped)
        except (TypeError, ValueError):  # a built-in without a signature
            return {}
    parameters = list(signature.parameters.values())
    if is_class or configurable.is_method:
        parameters = parameters[1:]
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def required_parameters(configurable: config.Configurable) -> list[str]:
    """Return the parameters that a call without arguments needs from gin."""
    wrapped = configurable.wrapped
    if inspect.isclass(wrapped) and type(wrapped).__call__ is not type.__call__:
        return []
    found = parameters_of(configurable, follow_wrapped=False)
    return [name for name, p in found.items() if p.default is p.empty or p.default is config.REQUIRED]


def accepts(parameter: inspect.Parameter, value: Any) -> bool:
    """Return False only if `value` contradicts the annotation and is unlike the default."""
    default, annotation = parameter.default, parameter.annotation
    return fits(value, annotation) or (type(value) is type(default) and not fits(default, annotation))


def fits(value: Any, annotation: Any) -> bool:
    """Return whether `value` has the annotated type; True for annotations that are not understood.

    >>> fits(3, float), fits("3", float), fits(["a"], typing.Sequence[str])
    (True, False, True)
    """
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind is typing.Union or kind is types.UnionType:
        return any(fits(value, argument) for argument in arguments)
    if kind is typing.Literal:
        return value is None or value in arguments
    if not inspect.isclass(kind):
        return True
    if isinstance(value, config.ConfigurableReference):
        return value.evaluate or kind not in _PLAIN
    if value is None:
        return kind not in (bool, int, float)
    if kind is type(None):
        return False
    if kind in _PLAIN:
        return isinstance(value, _PLAIN[kind]) and (kind is bool or not isinstance(value, bool))
    if kind is collections.abc.Callable:
        return not isinstance(value, (*_PLAIN, list, tuple, dict))
    if kind in _MAPPINGS:
        return isinstance(value, dict) and all(all(map(fits, item, arguments)) for item in value.items())
    if kind in _STRINGS and isinstance(value, str):
        return not arguments or fits(value, arguments[0])
    if kind in _SEQUENCES or kind in _STRINGS:
        uniform = len(arguments) == 1 or arguments[-1:] == (...,)
        return isinstance(value, (list, tuple)) and all(fits(item, arguments[0]) for item in value if uniform)
    return True
