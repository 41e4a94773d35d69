"""Import statements of gin files: ordinary modules, `__main__` (the entry points), aliases of absent packages, and
seqio where it is installed: what a run consists of is ours there too, and tasks are seqio's. Optax's functions remember
the learning rates that they are given."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import sys
import traceback
import types
from typing import Any

from gin import config_parser

from t5x.configuration.errors import Problem, display_path, suggestion
from t5x.configuration.session import Session
from t5x.errors import UserError

_logger = logging.getLogger(__name__)

DEFAULT_ALIASES: dict[str, str] = {"seqio": "t5x.data"}

# Names of an alias that are ours even where the package is installed, whichever of its modules a gin file takes them
# from. The package is imported when another name is asked for.
_ALWAYS_OURS = {
    "seqio": (
        *("Evaluator", "JSONLogger", "PyLoggingLogger", "TensorBoardLogger"),
        *("ByteVocabulary", "PassThroughVocabulary", "SentencePieceVocabulary", "Feature"),
        *("DecoderFeatureConverter", "EncDecFeatureConverter", "EncoderFeatureConverter", "LMFeatureConverter"),
        *("PassThroughFeatureConverter", "PrePackedEncDecFeatureConverter", "PrefixLMFeatureConverter"),
    )
}
_WITH_OURS = {"seqio": ("evaluation", "feature_converters", "loggers", "vocabularies")}


class Namespace:
    """Attributes of our own in front of those of a module (or of nothing)."""

    def __init__(self, name: str, behind: Any = None):
        self.__name__ = name
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._behind is None:
            raise AttributeError(name)
        return getattr(self._behind, name)

    def __dir__(self) -> list[str]:
        own = [name for name in vars(self) if not name.startswith("_")]
        return sorted({*own, *(dir(self._behind) if self._behind is not None else ())})

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}>"


class _Shared(Namespace):
    """An installed module with names of ours in front; it is imported when it is needed."""

    def __init__(self, name: str, statement: config_parser.ImportStatement, ours: types.ModuleType):
        super().__init__(name)
        top, _, inner = name.partition(".")
        self._statement = statement
        for own in _ALWAYS_OURS[top]:
            setattr(self, own, getattr(ours, own))
        for module in () if inner else _WITH_OURS[top]:
            setattr(self, module, _Shared(f"{name}.{module}", statement, ours))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_import(self.__name__, self._statement), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(_import(self.__name__, self._statement))})


class _Optax(Namespace):
    """Optax; what its functions make remembers the learning rate, which is then the one that is logged."""

    def __getattr__(self, name: str) -> Any:
        from t5x.optimizers.recorded import recorded  # here, because it imports JAX

        value = super().__getattr__(name)
        if inspect.ismodule(value):
            return _Optax(value.__name__, behind=value)
        return recorded(value) if inspect.isfunction(value) else value


def load(statement: config_parser.ImportStatement, session: Session) -> Any:
    """Imports the module and returns what `statement` binds its name to (for `import a.b`, that is `a`)."""
    if statement.module == "__main__":
        return _main(session)
    alias = _alias_for(statement.module, session)
    actual = statement.module
    if alias is None and actual.partition(".")[0] in _ALWAYS_OURS.keys() & session.aliases.keys():
        return _shared(statement, session)
    if alias is not None:
        actual = session.aliases[alias] + statement.module.removeprefix(alias)
        if alias not in session.announced:
            session.announced.add(alias)
            target = session.aliases[alias]
            _logger.info("%s is not installed: gin files that import %s use %s", alias, alias, target)
    module = _import(actual, statement)
    if actual.partition(".")[0] == "optax":
        module = module if statement.is_from or statement.alias else sys.modules["optax"]
        return _Optax(module.__name__, behind=module)
    if statement.is_from or statement.alias:
        return module
    top = statement.bound_name()
    if alias is None:
        return _merge(session.namespaces[top], sys.modules[top]) if top in session.namespaces else sys.modules[top]
    if alias == top:
        return sys.modules[session.aliases[alias]]
    return _nested(session, alias, sys.modules[session.aliases[alias]])


def _shared(statement: config_parser.ImportStatement, session: Session) -> Any:
    """What an import of an installed package, or of a module in it, means that shares its names with us."""
    top, _, inner = statement.module.partition(".")
    if inner and inner not in _WITH_OURS[top]:
        module = _import(statement.module, statement)
        if statement.is_from or statement.alias:
            return module
    if top not in session.announced:
        session.announced.add(top)
        _logger.info(
            "%s in gin files: vocabularies, feature converters, Evaluator and loggers are those of %s, the rest is the "
            "installed %s", top, session.aliases[top], top,
        )  # fmt: skip
    shared = _Shared(top, statement, importlib.import_module(session.aliases[top]))
    return getattr(shared, inner) if inner and (statement.is_from or statement.alias) else shared


def _main(session: Session) -> Namespace:
    main = Namespace("__main__", behind=sys.modules["__main__"])
    for entry in session.entry_points.values():  # in T5X it is the script, with all that it has
        names = vars(sys.modules[entry.__module__]).get("__all__", ())
        vars(main).update({name: getattr(sys.modules[entry.__module__], name) for name in names})
    vars(main).update(session.entry_points)
    return main


def _merge(namespace: Namespace, module: types.ModuleType) -> Namespace:
    namespace._behind = module
    return namespace


def _nested(session: Session, dotted: str, module: types.ModuleType) -> Namespace:
    """`a` such that `a.b.c` is `module`, where `dotted` is `a.b.c`; what real packages there are shines through."""
    top, *inner, last = dotted.split(".")
    node = session.namespaces.setdefault(top, Namespace(top, behind=sys.modules.get(top)))
    root, path = node, top
    for part in inner:
        path = f"{path}.{part}"
        if not isinstance(vars(node).get(part), Namespace):
            setattr(node, part, Namespace(path, behind=sys.modules.get(path)))
        node = vars(node)[part]
    setattr(node, last, module)
    return root


def _alias_for(module: str, session: Session) -> str | None:
    """The longest alias that `module` is or lies in, unless the package itself is installed."""
    for alias in sorted(session.aliases, key=len, reverse=True):
        if (module == alias or module.startswith(alias + ".")) and not _installed(alias):
            return alias
    return None


def _installed(module: str) -> bool:
    if module in sys.modules:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _import(name: str, statement: config_parser.ImportStatement) -> types.ModuleType:
    written = statement.format()
    via = "" if name == statement.module else f" (which stands for {name} here)"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise Problem(f"`{written}`{via}: {_not_found(name, error.name)}") from error
        raise Problem(f"`{written}`{via} failed: {_reason(error)}") from error
    except Exception as error:
        raise Problem(f"`{written}`{via} failed: {_reason(error)}") from error


def _not_found(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    package = sys.modules.get(parent)
    if package is not None and hasattr(package, last):
        short = parent.split(".")[-1]
        return f"gin imports modules, and {missing} is not one. Import {parent} and write {short}.{last}."
    if parent:
        siblings = [m.name for m in pkgutil.iter_modules(getattr(package, "__path__", ()))]
        return f"{parent} has no module `{last}`." + suggestion(last, siblings)
    message = f"there is no module `{missing}`."
    if os.path.exists(f"{missing}.py") or os.path.isdir(missing):
        return f"{message} It lies in the working directory, which Python does not search: set PYTHONPATH=."
    return message + suggestion(missing, {m.name for m in pkgutil.iter_modules()})


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({display_path(error.filename)}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _machinery(f.filename)]
    place = f" ({display_path(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _machinery(filename: str) -> bool:
    return filename.startswith("<") or filename in (__file__, importlib.__file__)
