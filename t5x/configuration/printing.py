"""Print the configuration as gin text that reads back as the same configuration."""

import itertools
import math
import pprint
import re
import textwrap
from collections.abc import Callable
from typing import Any

from gin.config import ConfigurableReference
from gin.config_parser import ImportStatement

from t5x.configuration import state as states
from t5x.configuration.values import MACRO, is_constant, is_macro, leaves_of, macros_in, map_value, scope_of

_WIDTH = 96
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_RULE = "# " + "=" * 78


class _Verbatim(str):
    """Text that is printed without quotes."""

    __repr__ = str.__str__


class Printer:
    """Formats names and values, and collects the import lines that they need."""

    def __init__(self, state: states.State):
        self.import_lines: list[str] = []
        self._sources = state.sources
        self._prefixes: dict[str, str] = {}  # module -> what names from it start with
        self._modules: dict[str, str] = {}  # name -> module that it stands for
        for statement, _ in state.imports:
            self._prefix(statement)

    def _prefix(self, statement: ImportStatement) -> str:
        module = statement.module
        if module not in self._prefixes:
            plain = not statement.is_from and not statement.alias
            name = statement.bound_name()
            target = name if plain else module
            if self._modules.get(name, target) != target:
                name = next(n for n in (f"{name}{i}" for i in itertools.count(2)) if n not in self._modules)
                statement, plain, target = statement._replace(alias=name), False, module
            self._modules[name] = target
            self._prefixes[module] = module if plain else name
            self.import_lines.append(statement.format())
        return self._prefixes[module]

    def selector(self, selector: str, scope: str = "") -> str:
        """Return a function or class as a gin file names it."""
        if selector in self._sources:
            statement, path = self._sources[selector]
            selector = f"{self._prefix(statement)}.{path}"
        return f"{scope}/{selector}" if scope else selector

    def name(self, key: states.Key) -> str:
        """Return the left side of a binding: a macro, or `scope/selector.parameter`."""
        scope, selector, parameter = key
        return scope if selector == MACRO else f"{self.selector(selector, scope)}.{parameter}"

    def value(self, value: Any, width: int = 1_000_000) -> str:
        """Return a value as gin text."""
        return pprint.pformat(map_value(value, self._leaf), width=width, sort_dicts=False)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, ConfigurableReference):
            if is_macro(leaf) or is_constant(leaf):
                return _Verbatim(f"%{scope_of(leaf)}")
            selector = self.selector(leaf.configurable.selector, scope_of(leaf))
            return _Verbatim(f"@{selector}()" if leaf.evaluate else f"@{selector}")
        if isinstance(leaf, float) and math.isinf(leaf):
            return _Verbatim("1e999" if leaf > 0 else "-1e999")
        return leaf

    def binding(self, key: states.Key, value: Any) -> str:
        """Return a binding; one that Python code made and gin cannot express becomes a comment."""
        text = self.value(value, _WIDTH)
        text = f"{self.name(key)} = " + (f"\\\n{textwrap.indent(text, '    ')}" if "\n" in text else text)
        return text if all(map(_is_gin, leaves_of(value))) else textwrap.indent(text, "# ")


def _is_gin(leaf: Any) -> bool:
    plain = leaf is None or type(leaf) in (str, bytes, bool, int, float)
    return isinstance(leaf, ConfigurableReference) or (plain and leaf == leaf)  # NaN is not


def config_str(*, show_provenance: bool = False) -> str:
    """Return the configuration as one gin file without includes: imports, macros, parameters.

    Args:
      show_provenance: whether a comment before each binding names the file and line, or argument, that set it.
    """
    state = states.current()

    def line(printer: Printer, key: states.Key, value: Any) -> str:
        origin = f"# Set in {state.origin(key)}:\n" if show_provenance else ""
        return origin + printer.binding(key, value)

    return _render(state, line)


def bindings() -> dict[str, str]:
    """Return every bound macro and parameter with its value as gin text. Memory addresses are removed."""
    printer = Printer(states.current())
    return {printer.name(key): _ADDRESS.sub("", printer.value(value)) for key, value in states.bindings()}


def resolved_str() -> str:
    """Return the configuration with macros replaced by their values, and named in a comment."""

    def line(printer: Printer, key: states.Key, value: Any) -> str:
        macros = ", ".join(f"%{name}" for name in sorted(set(macros_in(value))) if states.macro_value(name))
        return printer.binding(key, resolve(value)) + (f"  # {macros}" if macros else "")

    return _render(states.current(), line)


def _render(state: states.State, line: Callable[[Printer, states.Key, Any], str]) -> str:
    printer = Printer(state)
    sections: dict[tuple[str, str], list[str]] = {}
    for key, value in sorted(states.bindings(), key=lambda binding: binding[0]):
        scope, selector, _ = key
        name = "" if selector == MACRO else printer.selector(selector)
        title = f"# Parameters for {printer.selector(selector, scope)}:" if name else "# Macros:"
        sections.setdefault((name.lower(), title), []).append(line(printer, key, value))
    body = [text for (_, title), lines in sorted(sections.items()) for text in (title, _RULE, *lines, "")]
    head = ["from __gin__ import dynamic_registration"] * state.dynamic + printer.import_lines
    return "\n".join([*head, *([""] if head else []), *body])


def resolve(value: Any, within: tuple[str, ...] = ()) -> Any:
    """Return `value` with macros replaced; a macro that is undefined or refers to itself stays."""

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, ConfigurableReference) or not is_macro(leaf) or scope_of(leaf) in within:
            return leaf
        bound = states.macro_value(scope_of(leaf))
        return leaf if bound is None else resolve(bound[0], (*within, scope_of(leaf)))

    return map_value(value, replace)
