"""The configuration as gin text that gives the same configuration when it is read again."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from gin import config, config_parser

from t5x.configuration import session as sessions
from t5x.configuration.names import lookup
from t5x.configuration.session import MACRO, BindingKey, Session

_WIDTH = 100
_RULE = "# " + "=" * 78
_DYNAMIC = "from __gin__ import dynamic_registration"


class _Unwritable(Exception):
    """A value set from Python that no gin text stands for."""


class _Imports:
    """The import lines of the text, in the order of the files, each module once and each name once."""

    def __init__(self, session: Session):
        self.lines: list[str] = []
        self._prefixes: dict[str, str] = {}
        self._targets = {"gin": "reserved"} if session.dynamic else {}
        for statement in session.imports:
            self.prefix(statement)

    def prefix(self, statement: config_parser.ImportStatement) -> str:
        """What a name from the module of `statement` starts with; adds the import line if it is not there yet."""
        module = statement.module
        if module not in self._prefixes:
            plain = not statement.is_from and not statement.alias
            name = statement.bound_name()
            target = name if plain else module
            if self._targets.get(name, target) != target:
                taken, count = name, 2
                while name in self._targets:
                    name, count = f"{taken}{count}", count + 1
                statement, plain, target = statement._replace(alias=name), False, module
            self._targets[name] = target
            self._prefixes[module] = module if plain else name
            self.lines.append(statement.format())
        return self._prefixes[module]


class _Printer:
    """Writes selectors and values with the names that `imports` gives."""

    def __init__(self, session: Session):
        self._session = session
        self.imports = _Imports(session)

    def selector(self, configurable: config.Configurable) -> str:
        if configurable.module == "gin":
            return configurable.selector
        if configurable.import_source:
            statement, path = configurable.import_source
            return f"{self.imports.prefix(statement)}.{path}"
        importable = self._importable(configurable) if self._session.dynamic else None
        if importable is not None:
            module, path = importable
            location = config_parser.Location(None, 0, None, "")
            statement = config_parser.ImportStatement(module, "." in module, None, location)
            return f"{self.imports.prefix(statement)}.{path}"
        shortest = config._REGISTRY.minimal_selector(configurable.selector)
        return ".".join(configurable.selector.split(".")[-2:]) if configurable.is_method else shortest

    def _importable(self, configurable: config.Configurable) -> tuple[str, str] | None:
        """Module and path of a configurable that Python code registered, if they lead to it."""
        wrapped = configurable.wrapped
        for module, path in (
            (configurable.module, configurable.name),
            (getattr(wrapped, "__module__", None), getattr(wrapped, "__qualname__", "")),
        ):
            found: Any = sys.modules.get(module)
            for name in path.split("."):
                found = getattr(found, name, None)
            if found is not None and lookup(found) == configurable:
                return module, path
        return None

    def value(self, value: Any, indent: int = 0, room: int = _WIDTH) -> str:
        """`value` as gin text: on one line if it fits in `room`, otherwise one item a line."""
        flat = self._flat(value)
        if len(flat) + indent <= room or not isinstance(value, (dict, list, tuple)) or not value:
            return flat
        inner = indent + 4
        if isinstance(value, dict):
            items = [f"{self._flat(k)}: {self.value(v, inner)}" for k, v in value.items()]
        else:
            items = [self.value(item, inner) for item in value]
        opening, closing = {dict: "{}", list: "[]", tuple: "()"}[type(value)]
        lines = "".join(f"{' ' * inner}{item},\n" for item in items)
        return f"{opening}\n{lines}{' ' * indent}{closing}"

    def _flat(self, value: Any) -> str:
        if isinstance(value, config.ConfigurableReference):
            return self._reference(value)
        if type(value) is dict:
            return "{" + ", ".join(f"{self._flat(k)}: {self._flat(v)}" for k, v in value.items()) + "}"
        if type(value) is list:
            return "[" + ", ".join(map(self._flat, value)) + "]"
        if type(value) is tuple:
            return "(" + ", ".join(map(self._flat, value)) + ("," if len(value) == 1 else "") + ")"
        if type(value) is float and math.isinf(value):
            return "1e999" if value > 0 else "-1e999"
        if type(value) is complex and value.real == 0:
            return f"{value.imag!r}j"
        if value is None or (type(value) in (str, bytes, bool, int, float) and value == value):
            return repr(value)
        raise _Unwritable(repr(value))

    def _reference(self, reference: config.ConfigurableReference) -> str:
        scope = "/".join(reference.scopes)
        target = reference.configurable
        if reference.evaluate and (sessions.is_macro(target) or sessions.is_constant(target)):
            return f"%{scope}"
        return f"@{scope}{'/' if scope else ''}{self.selector(target)}{'()' if reference.evaluate else ''}"


def config_str(*, show_provenance: bool = False) -> str:
    """The whole configuration as one gin file that needs no other: imports, macros, bindings, in a fixed order.

    Args:
      show_provenance: whether each binding is preceded by a comment that says which file and line, or which argument,
        it comes from.
    """
    with sessions.LOCK:
        session = sessions.current()
        printer = _Printer(session)

        def entry(key: BindingKey, name: str, value: Any) -> str:
            line = _binding(printer, name, value)
            return f"# Set in {session.provenance(key)}:\n{line}" if show_provenance else line

        return _text(session, printer, entry)


def resolved_str() -> str:
    """The same with each macro replaced by its value, and a comment that names the macro: what a run would use."""
    with sessions.LOCK:
        session = sessions.current()
        printer = _Printer(session)

        def entry(key: BindingKey, name: str, value: Any) -> str:
            resolved = resolve(value)
            line = _binding(printer, name, resolved)
            macros = sorted({f"%{'/'.join(r.scopes)}" for r in sessions.references_in(value) if _replaced(r)})
            return f"{line}  # {', '.join(macros)}" if macros else line

        return _text(session, printer, entry)


def selector_text(configurable: config.Configurable) -> str:
    """The name of a configurable as a gin file of this configuration would write it."""
    return _Printer(sessions.current()).selector(configurable)


def value_text(value: Any) -> str:
    """A value as a gin file of this configuration would write it, on one line."""
    try:
        text = _Printer(sessions.current()).value(value, room=sys.maxsize)
    except _Unwritable as unwritable:
        text = str(unwritable)
    return text if len(text) <= 200 else f"{text[:200]} …"


def resolve(value: Any, within: tuple[str, ...] = ()) -> Any:
    """`value` with macros replaced by what they stand for; one that is undefined, required or circular is left."""
    if isinstance(value, config.ConfigurableReference):
        name = "/".join(value.scopes)
        if not _replaced(value) or name in within:
            return value
        return resolve(sessions.bound(MACRO, tuple(value.scopes))["value"][0], (*within, name))
    if isinstance(value, dict):
        return {resolve(k, within): resolve(v, within) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(resolve(item, within) for item in value)
    return value


def _replaced(reference: config.ConfigurableReference) -> bool:
    if not (sessions.is_macro(reference.configurable) and reference.evaluate):
        return False
    return "value" in sessions.bound(MACRO, tuple(reference.scopes))


def _binding(printer: _Printer, name: str, value: Any) -> str:
    try:
        return f"{name} = {printer.value(value, room=_WIDTH - len(name) - 3)}"
    except _Unwritable as unwritable:
        return f"# {name} was set from Python to {str(unwritable).splitlines()[0]}"


def _text(session: Session, printer: _Printer, entry: Callable[[BindingKey, str, Any], str]) -> str:
    macros = {scope: values["value"] for (scope, selector), values in config._CONFIG.items() if selector == MACRO}
    bound = {key: values for key, values in config._CONFIG.items() if key[1] != MACRO and values}
    body: list[str] = []
    if macros:
        body += ["# Macros:", _RULE]
        body += [entry((name, MACRO, "value"), name, macros[name]) for name in sorted(macros)]
        body.append("")
    named = {
        f"{scope}/{name}" if scope else name: (scope, selector)
        for scope, selector in bound
        for name in [printer.selector(config._REGISTRY[selector])]
    }
    for name in sorted(named, key=lambda n: (n.rsplit("/", 1)[-1].lower(), n)):
        scope, selector = named[name]
        body += [f"# Parameters for {name}:", _RULE]
        for parameter, value in sorted(bound[scope, selector].items()):
            body.append(entry((scope, selector, parameter), f"{name}.{parameter}", value))
        body.append("")
    head = [_DYNAMIC] if session.dynamic else []
    head += printer.imports.lines
    return "\n".join([*head, *([""] if head else []), *body])
