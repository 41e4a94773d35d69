"""Gin values: Python literals that may contain references (`@name`, `@name()`) and macros (`%NAME`)."""

import dataclasses
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
