"""Gin values: Python literals that may contain references (`@name`, `@name()`) and macros (`%NAME`)."""

import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from gin import config
from gin.config import ConfigurableReference

MACRO = "gin.macro"
_CONSTANT = "gin.constant"


@dataclasses.dataclass(frozen=True)
class ParsedReference:
    """A reference as the parser found it; `name` includes the scopes."""

    name: str
    evaluate: bool


class ParserDelegate(config.ParserDelegate):
    """Parses references without resolving them, so that errors can name the statement they are in."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> ParsedReference:
        return ParsedReference(scoped_selector, evaluate)


def map_value(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to everything in `value` that is not a container, dict keys included."""
    if type(value) is dict:
        return {map_value(key, fn): map_value(item, fn) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_value(item, fn) for item in value)
    return fn(value)


def leaves_of(value: Any) -> list[Any]:
    """Return everything in `value` that is not a container, dict keys included."""
    leaves: list[Any] = []
    map_value(value, leaves.append)
    return leaves


def references_in(value: Any) -> list[ConfigurableReference]:
    """Return all references and macros in a value."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, ConfigurableReference)]


def macros_in(value: Any) -> list[str]:
    """Return the names of all macros in a value."""
    return [scope_of(reference) for reference in references_in(value) if is_macro(reference)]


def is_macro(reference: ConfigurableReference) -> bool:
    return reference.configurable.selector == MACRO and reference.evaluate


def is_constant(reference: ConfigurableReference) -> bool:
    return reference.configurable.selector == _CONSTANT


def is_required(reference: ConfigurableReference) -> bool:
    """Return whether a reference is `%gin.REQUIRED`."""
    return is_constant(reference) and scope_of(reference) == "gin.REQUIRED"


def scope_of(reference: ConfigurableReference) -> str:
    """Return the scopes of a reference; those of a macro or constant are its name."""
    return "/".join(reference.scopes)


_PLAIN = {bool: (bool, int), int: (int,), float: (int, float), str: (str,), bytes: (bytes,)}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (
    *(list, tuple, set, frozenset, collections.abc.MutableSequence, collections.abc.Set),
    *(collections.abc.Iterable, collections.abc.Collection, collections.abc.Sequence),
)
_GIN_TYPES = (*_PLAIN, type(None), list, tuple, dict)  # of values that are not references
_UNIONS = (typing.Union, types.UnionType)
_ANYTHING = (Any, object, typing.Annotated, inspect.Parameter.empty)


def parameters_of(configurable: config.Configurable, follow_wrapped: bool = True) -> dict[str, inspect.Parameter]:
    """Return the parameters that gin can bind, by name.

    Args:
      follow_wrapped: whether to return those of a decorated function rather than those of its decorator.
    """
    function = _constructor_of(configurable.wrapped)
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped, eval_str=True)
    except Exception:  # an annotation that cannot be evaluated
        try:
            signature = inspect.signature(function, follow_wrapped=follow_wrapped)
        except (TypeError, ValueError):  # a built-in without a signature
            return {}
    parameters = list(signature.parameters.values())
    if inspect.isclass(configurable.wrapped) or configurable.is_method:
        parameters = parameters[1:]
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _constructor_of(target: Any) -> Any:
    """Return what has the signature of a class; `target` itself if it is a function."""
    if not inspect.isclass(target):
        return target
    return target.__new__ if target.__init__ is object.__init__ else target.__init__


def is_ours(configurable: config.Configurable) -> bool:
    """Return whether t5x defines the parameters; a user's class may inherit them."""
    return "t5x" in (_package(configurable.wrapped), _package(_constructor_of(configurable.wrapped)))


def _package(target: Any) -> str:
    return str(getattr(target, "__module__", None)).partition(".")[0]


def required_parameters(configurable: config.Configurable) -> list[str]:
    """Return the parameters that a call without arguments needs from gin."""
    wrapped = configurable.wrapped
    if inspect.isclass(wrapped) and type(wrapped).__call__ is not type.__call__:
        return []
    parameters = parameters_of(configurable, follow_wrapped=False)
    return [name for name, p in parameters.items() if p.default is p.empty or p.default is config.REQUIRED]


def accepts(parameter: inspect.Parameter, value: Any) -> bool:
    """Return False only if `value` contradicts the annotation and is unlike the default."""
    default, annotation = parameter.default, parameter.annotation
    return fits(value, annotation) or (type(value) is type(default) and not fits(default, annotation))


def fits(value: Any, annotation: Any) -> bool:
    """Return whether `value` has the annotated type; True for annotations that are not understood.

    Lists and tuples are interchangeable. A string is not a sequence of strings.

    >>> fits(3, float), fits("3", float), fits(["a"], typing.Sequence[str])
    (True, False, True)
    """
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind in _UNIONS:
        return any(fits(value, argument) for argument in arguments)
    if isinstance(value, config.ConfigurableReference):
        return _reference_fits(value, type(arguments[0]) if kind is typing.Literal else kind)
    if kind is typing.Literal:
        return value in arguments
    if kind in _ANYTHING or not inspect.isclass(kind) or type(value) not in _GIN_TYPES:
        return True
    if kind in _PLAIN:
        return type(value) in _PLAIN[kind] and (kind is not bool or value in (0, 1))
    if kind in _MAPPINGS:
        return isinstance(value, dict) and all(all(map(fits, item, arguments)) for item in value.items())
    if kind in _SEQUENCES and isinstance(value, (list, tuple)):
        if kind is not tuple or arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments or value) and all(map(fits, value, arguments))
    if kind in _SEQUENCES:
        return False
    if isinstance(value, str) and issubclass(kind, enum.Enum):
        return value in kind.__members__ or value in [member.value for member in kind]
    if isinstance(value, str) and (annotation is type or kind.__name__ == "dtype"):
        return True
    try:
        return isinstance(value, kind)
    except TypeError:  # a TypedDict
        return isinstance(value, dict)


def _reference_fits(reference: config.ConfigurableReference, kind: Any) -> bool:
    """Return whether a reference can be a `kind`. Objects that users' code creates can be anything."""
    if kind in _ANYTHING or not inspect.isclass(kind) or getattr(kind, "_is_protocol", False):
        return True
    if not reference.evaluate:
        return issubclass(kind, collections.abc.Callable)  # type: ignore[arg-type]
    result = target = reference.configurable.wrapped
    if not inspect.isclass(target):
        result = getattr(target, "__annotations__", {}).get("return")
        result = typing.get_origin(result) or result
    if _package(target) != "t5x" or not inspect.isclass(result) or result in _ANYTHING:
        return True
    return issubclass(result, _PLAIN.get(kind, kind)) or issubclass(kind, result)


def describe(annotation: Any) -> str:
    """Return an annotation in words, without the arrays and complex numbers that gin files cannot contain.

    >>> describe(dict[str, int] | None)
    'a mapping from str to int or None'
    """
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind in _UNIONS:
        in_gin = [a for a in arguments if a is not complex and _package(a) not in ("jax", "jaxlib", "numpy")]
        return " or ".join(dict.fromkeys(map(describe, in_gin or arguments)))
    if kind is typing.Literal:
        return " or ".join(map(repr, arguments))
    items = [describe(argument) for argument in arguments if argument not in (..., Any)]
    if kind in _MAPPINGS:
        return f"a mapping from {' to '.join(items)}" if items else "a mapping"
    if kind is tuple and len(items) > 1:
        return f"a list of {len(items)} values ({', '.join(items)})"
    if kind in _SEQUENCES:
        return " of ".join(["a list", *items])
    if kind is type(None):
        return "None"
    if kind is collections.abc.Callable or kind is type:
        return "a function or class (@NAME)"
    if inspect.isclass(kind) and kind.__module__ != "builtins":
        return f"{kind.__name__} (@NAME())"
    return inspect.formatannotation(annotation)
