"""Whether a gin value can be what a parameter's annotation asks for. When in doubt, it can."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import types
import typing
from typing import Any

from gin import config

_PLAIN = (int, float, complex, bool, str, bytes)
_LOOSE_SEQUENCES = (collections.abc.Iterable, collections.abc.Collection, collections.abc.Sequence)
_SEQUENCES = (
    *_LOOSE_SEQUENCES,
    collections.abc.MutableSequence,
    collections.abc.Set,
    list,
    tuple,
    set,
    frozenset,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def accepts(parameter: inspect.Parameter, annotation: Any, value: Any) -> bool:
    """Whether `parameter` can take `value`.

    Args:
      parameter: of the Python signature.
      annotation: its annotation, resolved; `inspect.Parameter.empty` where there is none.
      value: a gin value with its macros replaced; references are left as they are.
    """
    default = parameter.default
    if annotation is inspect.Parameter.empty:
        return _like_default(value, default)
    if fits(value, annotation):
        return True
    if default is inspect.Parameter.empty:
        return False
    return value is default or (type(value) is type(default) and not fits(default, annotation))


def _like_default(value: Any, default: Any) -> bool:
    """Without an annotation only what is plainly a slip is refused: words for a bool, quoted numbers for a number."""
    if not isinstance(value, str):
        return True
    if isinstance(default, bool):
        return False
    return not (isinstance(default, (int, float)) and _reads_as_number(value))


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def fits(value: Any, annotation: Any) -> bool:
    """Whether `value` is of the type `annotation`; anything fits an annotation that is not understood.

    >>> fits(3, float), fits("3", float), fits(["a"], typing.Sequence[str])
    (True, False, True)
    """
    annotation = _bare(annotation)
    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if _one_of(origin, (typing.Union, types.UnionType)):
        return any(fits(value, member) for member in arguments)
    if isinstance(value, config.ConfigurableReference):
        return value.evaluate or not _one_of(origin, (*_PLAIN, typing.Literal))
    if origin is typing.Literal:
        return value is None or any(value == option and type(value) is type(option) for option in arguments)
    if value is None:
        return not _one_of(origin, (int, float, bool))
    if _one_of(origin, _PLAIN):
        return _fits_plain(value, origin)
    if origin is type(None):
        return False
    if inspect.isclass(origin) and issubclass(origin, enum.Enum):
        return _fits_enum(value, origin)
    if origin is collections.abc.Callable:
        return not isinstance(value, (*_PLAIN, list, tuple, dict))
    if _one_of(origin, _MAPPINGS):
        return isinstance(value, dict) and _fits_items(value, arguments)
    if _one_of(origin, _SEQUENCES):
        return _fits_sequence(value, origin, arguments)
    return True


def _one_of(origin: Any, kinds: tuple) -> bool:
    """Membership by identity: annotations may be anything, also things whose `==` does not answer yes or no."""
    return any(origin is kind for kind in kinds)


def _bare(annotation: Any) -> Any:
    """The annotation without `Annotated[…]` and `NewType`."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _fits_plain(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if isinstance(value, bool):
        return False
    wider = {float: (int, float), complex: (int, float, complex)}
    return isinstance(value, wider.get(kind, kind))


def _fits_enum(value: Any, kind: type[enum.Enum]) -> bool:
    named = isinstance(value, str) and value in kind.__members__
    return named or isinstance(value, kind) or any(value == member.value for member in kind)


def _fits_items(value: dict, arguments: tuple) -> bool:
    if len(arguments) != 2:
        return True
    keys, values = arguments
    return all(fits(k, keys) and fits(v, values) for k, v in value.items())


def _fits_sequence(value: Any, origin: Any, arguments: tuple) -> bool:
    if isinstance(value, str):
        return _one_of(origin, _LOOSE_SEQUENCES) and (not arguments or fits("", arguments[0]))
    if isinstance(value, dict):
        return _one_of(origin, (collections.abc.Iterable, collections.abc.Collection))
    if not isinstance(value, (list, tuple)):
        return False
    if not arguments:
        return True
    if origin is tuple and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    return all(fits(item, arguments[0]) for item in value)


def describe(parameter: inspect.Parameter, annotation: Any) -> str:
    """The expected type in words, for a message."""
    if annotation is inspect.Parameter.empty:
        return f"{type(parameter.default).__name__} (its default is {parameter.default!r})"
    annotation = _bare(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return f"{annotation.__name__}: one of {', '.join(annotation.__members__)}"
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(annotation)))
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def hint(annotation: Any, value: Any) -> str:
    """How to mend a value of the wrong type, where that is plain."""
    union = _one_of(typing.get_origin(annotation), (typing.Union, types.UnionType))
    members = [_bare(member) for member in (typing.get_args(annotation) if union else (annotation,))]
    wanted = {member for member in members if isinstance(member, type)}
    if isinstance(value, config.ConfigurableReference):
        return f" {value!r} is a function or class: write {value!r}() for what it returns."
    if isinstance(value, float) and int in wanted and value.is_integer():
        return f" Write {int(value)}."
    if isinstance(value, str) and wanted & {int, float} and _reads_as_number(value):
        return " Write it without quotes."
    if isinstance(value, str) and bool in wanted and value.lower() in ("true", "false"):
        return f" Write {value.capitalize()}, without quotes."
    if isinstance(value, (int, float)) and str in wanted:
        return f" Write it in quotes: '\"{value}\"' on the command line."
    return ""
