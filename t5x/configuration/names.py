"""From a name in a gin file to the function or class it stands for, made configurable when first named."""

from __future__ import annotations

import inspect
from typing import Any

from gin import config, config_parser

from t5x.configuration import imports
from t5x.configuration.errors import Problem, nearest, suggestion
from t5x.configuration.session import Session, Symbol

_MISSING = object()
_NO_LOCATION = config_parser.Location(None, 0, None, "")


class Context(config.ParseContext):
    """The names that one gin file (or the command line) can use.

    With `from __gin__ import dynamic_registration`, names are those that the file imports. Without it, they are the
    configurables known already (the end of a name is enough), and then anything that an earlier file imported.
    """

    def __init__(self, session: Session):
        super().__init__()
        self._session = session
        self._own: dict[str, list[Symbol]] = {}

    def process_import(self, statement: config_parser.ImportStatement) -> None:
        if statement.is_from and statement.module.startswith("__gin__."):
            try:
                super().process_import(statement)
            except SyntaxError as error:
                raise Problem(f"`{statement.format()}`: {error.msg.splitlines()[0]}") from error
            self._session.dynamic = True
            return
        name = statement.bound_name()
        if name == "gin" and self._dynamic_registration:
            raise Problem(f"`{statement.format()}`: the name `gin` is taken. Import it under another name (`as …`).")
        symbol = Symbol(imports.load(statement, self._session), statement)
        self._imports.append(statement)
        self._session.imports.append(statement)
        self._session.symbols[name] = symbol
        self._own.setdefault(name, []).append(symbol)

    def get_configurable(self, selector: str) -> config.Configurable:
        """The configurable that `selector` (without scope) names. Raises `Problem` where there is none."""
        head = selector.split(".")[0]
        if head == "gin" and selector in config._REGISTRY:
            return config._REGISTRY[selector]
        if self._dynamic_registration:
            if head in self._own:
                return self._from_symbol(self._best(self._own[head], selector), selector)
            decorated = self._decorated(selector)
            if decorated is None:
                raise Problem(f"`{selector}` is not known: this file imports no `{head}`.{self._how_to_import(head)}")
            return decorated
        return self._known(selector)

    def _known(self, selector: str) -> config.Configurable:
        if selector in self._session.entry_points:
            return entry_point(self._session.entry_points[selector], self._session)
        matches = config._REGISTRY.matching_selectors(selector)
        if len(matches) == 1:
            return config._REGISTRY[matches[0]]
        symbol = self._session.symbols.get(selector.split(".")[0])
        if symbol is not None:
            return self._from_symbol(symbol, selector)
        if matches:
            raise Problem(f"`{selector}` could be any of {', '.join(sorted(matches))}: write more of its name.")
        method = self._method_of_known_class(selector)
        if method is not None:
            return method
        candidates = [short_selector(c) for _, c in config._REGISTRY.items() if c.module != "gin"]
        mend = (
            suggestion(selector, candidates) or f" Imported: {', '.join(sorted(self._session.symbols)) or 'nothing'}."
        )
        raise Problem(f"`{selector}` is not known: no gin file imports or names it.{mend}")

    def _method_of_known_class(self, selector: str) -> config.Configurable | None:
        owner, _, method = selector.rpartition(".")
        matches = config._REGISTRY.matching_selectors(owner) if owner else []
        if len(matches) != 1 or not inspect.isclass(config._REGISTRY[matches[0]].wrapped):
            return None
        parent = config._REGISTRY[matches[0]]
        return register_method(parent, method, _attribute(parent.wrapped, method, owner), self._session)

    def _decorated(self, selector: str) -> config.Configurable | None:
        """A configurable that Python code registered itself; those can be named without an import."""
        found = [config._REGISTRY[match] for match in config._REGISTRY.matching_selectors(selector)]
        return found[0] if len(found) == 1 and found[0].import_source is None else None

    def _how_to_import(self, head: str) -> str:
        elsewhere = self._session.symbols.get(head)
        if elsewhere is not None:
            return f" Another gin file says `{elsewhere.statement.format()}`; this file needs the line, too."
        return suggestion(head, self._own) or f" Imported here: {', '.join(sorted(self._own)) or 'nothing'}."

    def _best(self, symbols: list[Symbol], selector: str) -> Symbol:
        """Of several `import a.b` lines that bind `a`, the one that reaches furthest into `selector`."""
        return max(reversed(symbols), key=lambda s: len(_shared(s.statement, selector)))

    def _from_symbol(self, symbol: Symbol, selector: str) -> config.Configurable:
        head, *rest = selector.split(".")
        values = [symbol.value]
        for depth, name in enumerate(rest):
            values.append(_attribute(values[-1], name, ".".join([head, *rest[:depth]])))
        found = lookup(values[-1])
        if found is not None:
            return found
        if not rest or not callable(values[-1]):
            raise Problem(f"`{selector}` is neither a function nor a class, so nothing of it can be set.")
        if inspect.isfunction(values[-1]) and inspect.isclass(values[-2]):
            parent = self._from_symbol(symbol, ".".join([head, *rest[:-1]]))
            return register_method(parent, rest[-1], values[-1], self._session)
        module = ".".join([symbol.statement.partial_path(), *rest[:-1]])
        if f"{module}.{rest[-1]}" in config._REGISTRY:  # `import a.b as c` next to a module `a.c`
            module = ".".join([symbol.statement.module, *rest[:-1]])
        return _register(
            self._session, values[-1], name=rest[-1], module=module, import_source=_source(symbol.statement, selector)
        )


def _attribute(value: Any, name: str, path: str) -> Any:
    found = getattr(value, name, _MISSING)
    if found is not _MISSING:
        return found
    if isinstance(value, imports.Namespace) and value.__name__ == "__main__":
        offered = ", ".join(f"`{n}`" for n in vars(value) if not n.startswith("_")) or "nothing"
        raise Problem(
            f"`{path}.{name}` is not known: `__main__` offers {offered} here. Is the file for another command?"
        )
    if inspect.isclass(value):
        what = f"class {value.__name__} has no method `{name}`"
    elif inspect.ismodule(value) or isinstance(value, imports.Namespace):
        what = f"module {value.__name__} has no `{name}`"
    else:
        what = f"`{path}` has no `{name}`"
    near = nearest(name, [n for n in dir(value) if not n.startswith("_")])
    hint = f" Nearest: {', '.join(f'{path}.{n}' for n in near)}." if near else ""
    raise Problem(f"`{path}.{name}` is not known: {what}.{hint}")


def _shared(statement: config_parser.ImportStatement, selector: str) -> list[str]:
    """The leading components of a plain import's module that `selector` spells out."""
    shared = []
    for part, name in zip(statement.module.split("."), selector.split(".")[:-1], strict=False):
        if part != name:
            break
        shared.append(part)
    return shared


def _source(statement: config_parser.ImportStatement, selector: str) -> tuple[config_parser.ImportStatement, str]:
    """The import that reaches a configurable, and its path within the imported module."""
    names = selector.split(".")
    if statement.is_from or statement.alias:
        return statement, ".".join(names[1:])
    shared = _shared(statement, selector)
    return statement._replace(module=".".join(shared)), ".".join(names[len(shared) :])


def lookup(target: Any) -> config.Configurable | None:
    """The configurable made from `target`, if there is one."""
    try:
        return config._inverse_lookup(target)
    except (TypeError, ValueError):
        return None


def _register(session: Session, target: Any, *, name: str, **where: Any) -> config.Configurable:
    try:
        return session.register(target, name=name, **where)
    except Exception as error:
        raise Problem(f"`{name}` cannot be configured with gin: {error}") from error


def register_method(parent: config.Configurable, name: str, function: Any, session: Session) -> config.Configurable:
    """Makes a method configurable, and the class anew, so that its instances have the configured method."""
    found = lookup(function)
    if found is not None:
        return found
    source = parent.import_source and (parent.import_source[0], f"{parent.import_source[1]}.{name}")
    _register(session, function, name=name, module=parent.selector, import_source=source)
    renewed = _register(
        session,
        parent.wrapped,
        name=parent.name,
        module=parent.module,
        import_source=parent.import_source,
        allowlist=parent.allowlist,
        denylist=parent.denylist,
    )
    for reference in session.references:
        if reference.configurable.wrapped is parent.wrapped:
            reference._configurable = renewed
            reference._scoped_configurable_fn = config._decorate_with_scope(renewed, reference.scopes)
    return config._INVERSE_REGISTRY[function]


def entry_point(fn: Any, session: Session) -> config.Configurable:
    """The configurable of an entry function, registered as a name of `__main__` where no gin file named it."""
    found = lookup(fn)
    if found is not None:
        return found
    name = next((n for n, f in session.entry_points.items() if f is fn), None)
    if name is None:
        return _register(session, fn, name=fn.__name__, module=fn.__module__, import_source=None)
    imported = [s for s in session.imports if s.module == "__main__"]
    alias = f"{fn.__module__.rsplit('.', 1)[-1].strip('_')}_script"
    statement = (*imported, config_parser.ImportStatement("__main__", False, alias, _NO_LOCATION))[0]
    return _register(session, fn, name=name, module=statement.partial_path(), import_source=(statement, name))


def short_selector(configurable: config.Configurable) -> str:
    """The shortest name that is still clear: a method has its class, anything else its module, if it has one."""
    shortest = config._REGISTRY.minimal_selector(configurable.selector)
    if configurable.is_method:
        return max(shortest, ".".join(configurable.selector.split(".")[-3:]), key=len)
    return max(shortest, ".".join(configurable.selector.split(".")[-2:]), key=len)
