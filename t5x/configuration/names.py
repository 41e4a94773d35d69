"""Resolve the names in gin files to functions and classes, and register those with gin."""

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import gin
from gin import config
from gin.config_parser import ImportStatement, Location

from t5x._runtime import imports
from t5x._runtime.errors import did_you_mean
from t5x.configuration.state import ConfigurationError, Import, State, bindings

_MISSING = object()
# {module or package that files of earlier versions name: where it is now}; the first one that fits counts
_MOVED_MODULES = {
    "t5x.plain": "t5x.cli.file_training",
    "t5x.verbs.file_training": "t5x.cli.file_training",
    "t5x.ranking.judged_source": "t5x.apps.ranking.judged_data",
    "t5x.ranking.judgments": "t5x.apps.ranking.judged_data",
    "t5x.ranking.preprocessors": "t5x.apps.ranking.tasks",
    "t5x.ranking": "t5x.apps.ranking",
    "t5x.answering": "t5x.apps.answering",
    "t5x.exporting": "t5x.apps.exporting",
}

registered: set[str] = set()  # selectors that this module registered, not those of `@gin.configurable`


class FileNames:
    """The names that one gin file, or one command-line argument, can use.

    After `from __gin__ import dynamic_registration` these are the file's own imports. Otherwise they are all that
    earlier files imported or named, and the last parts of a name are enough.
    """

    def __init__(self, state: State):
        self._state = state
        self._dynamic = False
        self._imports: list[Import] = []

    def add_import(self, statement: ImportStatement) -> None:
        if statement.module.startswith("__gin__."):
            if statement.format() != "from __gin__ import dynamic_registration" or self._imports:
                raise ConfigurationError("`from __gin__ import dynamic_registration` must be the first import.")
            self._dynamic = self._state.dynamic = True
            return
        statement = _current_import(statement)
        imported = Import(statement, _load(statement, self._state))
        self._imports.append(imported)
        self._state.imports.append(imported)

    def find(self, selector: str) -> str:
        """Return the complete selector of what `selector` (without scopes) names; register it if necessary."""
        selector = current_name(selector)
        if _registered_in_python(selector) == selector:
            return selector
        imported = _import_for(self._imports if self._dynamic else self._state.imports, selector)
        if not self._dynamic:
            if selector in self._state.entry_points:
                return entry_point(self._state.entry_points[selector], self._state)
            matches = [known for known in self._state.sources if f".{known}".endswith(f".{selector}")]
            if len(matches) == 1:
                return matches[0]
            if matches and imported is None:
                raise ConfigurationError(f"`{selector}` is ambiguous: write {' or '.join(sorted(matches))}.")
        if imported is not None:
            return self._from_import(imported, selector)
        return _registered_in_python(selector) or self._raise_unknown(selector)

    def _from_import(self, imported: Import, name: str) -> str:
        head, *attributes = name.split(".")
        owner, value, written = None, imported.module, head
        for part in attributes:
            owner, value, written = value, _attribute(value, part, written), f"{written}.{part}"
        statement, path = _source(imported.statement, name)
        selector = _selector_of(value)
        if selector is None:
            if not attributes or not callable(value):
                raise ConfigurationError(f"`{name}` is not a function or class.")
            if inspect.isfunction(value) and inspect.isclass(owner):
                selector = _register_method(self.find(name.rpartition(".")[0]), attributes[-1])
            else:
                selector = _register(value, f"{_module_name(statement)}.{path}")
        self._state.sources.setdefault(selector, (statement, path))
        return selector

    def _raise_unknown(self, selector: str) -> NoReturn:
        head = selector.split(".")[0]
        elsewhere = _import_for(self._state.imports, selector)
        if elsewhere is not None:
            raise ConfigurationError(f"`{head}` is not imported. Add `{elsewhere.statement.format()}` to this file.")
        if self._dynamic:
            names = [imported.statement.bound_name() for imported in self._imports]
            raise ConfigurationError(f"`{selector}`: `{head}` is not imported.{did_you_mean(head, names)}")
        known = [f"{statement.bound_name()}.{path}" for statement, path in self._state.sources.values()]
        known += self._state.entry_points
        shown = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
        raise ConfigurationError(f"`{selector}` is unknown: no gin file imports it.{did_you_mean(selector, shown)}")


def entry_point(fn: Callable[..., Any], state: State) -> str:
    """Return the selector of an entry function; register it if no gin file names it."""
    name = next((name for name, function in state.entry_points.items() if function is fn), None)
    if name is None:
        return _selector_of(fn) or _register(fn, f"{fn.__module__}.{fn.__name__}")
    alias = f"{fn.__module__.rpartition('.')[2].strip('_')}_script"
    default = ImportStatement("__main__", False, alias, Location(None, 0, None, ""))
    imported = [statement for statement, _ in state.imports if statement.module == "__main__"]
    statement = (*imported, default)[0]
    selector = _selector_of(fn) or _register(fn, f"{_module_name(statement)}.{name}")
    state.sources.setdefault(selector, (statement, name))
    return selector


def current_name(name: str) -> str:
    """Return today's name of a module, class or function that an earlier version wrote to a file."""
    for old, new in _MOVED_MODULES.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def configurable(selector: str) -> config.Configurable:
    """Return what gin has registered under a complete selector."""
    return config.ConfigurableReference(selector, False).configurable


def _selector_of(target: Any) -> str | None:
    """Return the selector of a registered function or class; gin has no public function for this."""
    try:
        known = config._inverse_lookup(target)
    except (TypeError, ValueError):  # not hashable, or `__wrapped__` is circular
        return None
    is_replaced = known is None or configurable(known.selector).wrapped is not known.wrapped
    return None if is_replaced else known.selector


def _registered_in_python(selector: str) -> str | None:
    """Return the complete selector of a `@gin.configurable`, which gin files can name without an import."""
    try:
        complete = configurable(selector).selector
    except (KeyError, ValueError):
        return None
    return None if complete in registered else complete


def _register(target: Any, selector: str) -> str:
    _make_configurable(target, selector)
    registered.add(selector)
    return selector


def _register_method(owner: str, name: str) -> str:
    """Register a method and, so that instances use it, the class again."""
    known = configurable(owner)
    method = _attribute(known.wrapped, name, owner)
    selector = _selector_of(method)
    if selector is None:
        selector = _register(method, f"{owner}.{name}")
        _make_configurable(known.wrapped, owner, allowlist=known.allowlist, denylist=known.denylist)
        for reference in config.iterate_references(dict(bindings()), to=known.wrapper):
            reference.initialize()
    return selector


def _make_configurable(target: Any, selector: str, **lists: Any) -> None:
    module, _, name = selector.rpartition(".")
    for mode in (contextlib.nullcontext, config.interactive_mode):  # the latter replaces names of reloaded modules
        try:
            with gin.unlock_config(), mode():
                gin.external_configurable(target, name, module=module, **lists)
                return
        except Exception as error:
            problem = error
    raise ConfigurationError(f"`{selector}` cannot be configured: {problem}") from problem


def _attribute(value: Any, name: str, written: str) -> Any:
    attribute = getattr(value, name, _MISSING)
    if attribute is not _MISSING:
        return attribute
    public = [n for n in dir(value) if not n.startswith("_")]
    close = did_you_mean(name, {n: f"{written}.{n}" for n in public})
    if not close and getattr(value, "__name__", "") == "__main__":
        close = f" This command offers {', '.join(public)}. Is the gin file for another command?"
    raise ConfigurationError(f"`{written}` has no `{name}`.{close}")


def _import_for(imports: list[Import], selector: str) -> Import | None:
    """Return the import that provides `selector`: of several `import a.b` the longest match, else the latest."""
    candidates = [imported for imported in imports if imported.statement.bound_name() == selector.split(".")[0]]
    return min(reversed(candidates), key=lambda imported: len(_source(imported.statement, selector)[1]), default=None)


def _source(statement: ImportStatement, selector: str) -> tuple[ImportStatement, str]:
    """Return the import of the module that holds `selector`, and the path within that module."""
    head, _, path = selector.partition(".")
    if statement.is_from or statement.alias:
        return statement, path
    if not selector.startswith(f"{statement.module}."):
        statement = statement._replace(module=head)
    return statement, selector.removeprefix(f"{statement.module}.")


def _module_name(statement: ImportStatement) -> str:
    return statement.bound_name() if statement.module == "__main__" else statement.module


def _current_import(statement: ImportStatement) -> ImportStatement:
    """Return an import with the present name of its module, bound to the name that the file uses."""
    current = statement._replace(module=current_name(statement.module))
    is_bound = current.bound_name() == statement.bound_name()
    return current if is_bound else current._replace(alias=statement.bound_name())


def _load(statement: ImportStatement, state: State) -> Any:
    """Import a module, and return what the statement binds its name to (for `import a.b`, that is `a`)."""
    top, *submodules = statement.module.split(".")
    if top == "__main__":
        return _main(state)
    try:
        if top in state.stand_ins:
            module = package = importlib.import_module(state.stand_ins[top])
            for name in submodules:
                module = getattr(module, name, None) or importlib.import_module(f"{module.__name__}.{name}")
        else:
            module = imports.import_module(statement.module)
            package = sys.modules.get(top, module)  # ours in the place of t5
    except Exception as error:
        raise ConfigurationError(f"`{statement.format()}` failed: {imports.explain(error)}") from error
    return module if statement.is_from or statement.alias else package


def _main(state: State) -> types.ModuleType:
    """Make the module for `import __main__`: the entry points, the public names of their modules, and the program's."""
    main = types.ModuleType("__main__")
    vars(main).update({name: value for name, value in vars(sys.modules["__main__"]).items() if name[0] != "_"})
    for entry in state.entry_points.values():
        module = sys.modules[entry.__module__]
        vars(main).update({name: getattr(module, name) for name in getattr(module, "__all__", ())})
    vars(main).update(state.entry_points)
    return main
