"""Hashes of Python functions and values: equal in every process, different if the results may differ.

A function is hashed by its bytecode, constants, defaults, closure and the globals that it reads, recursively. Functions
and classes of the standard library and of installed packages are hashed by their name and the package's version. Those
in the user's own files and in the package of the value passed to `fingerprint` are followed, and so are functions of
t5x; classes of t5x are hashed by name. Line numbers, comments, docstrings and names of local variables do not count.
Bytecode, and therefore these hashes, belong to one minor version of Python.

A checkpoint outlives versions of packages, including t5x. In the hashes that it stores (`lasting`), functions and
classes of packages and of t5x are hashed by their name, arguments and closures. Versions, the order of a dict's items,
and the states of random generators do not count there.
"""

import dis
import functools
import hashlib
import importlib.metadata
import inspect
import os
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # hashes of functions depend on its bytecode
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_NOT_OF_A_CLASS = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
    "__slotnames__", "__parameters__",
}  # fmt: skip


def fingerprint(value: Any, *, lasting: bool = False) -> str:
    """Return the hash of a value, in hexadecimal.

    Args:
      lasting: for comparison after upgrades, see above.
    """
    return _Walk(_package_of(value), lasting)(value).hex()


def _package_of(value: Any) -> str | None:
    while hasattr(value, "func"):  # functools.partial
        value = value.func
    module = getattr(value, "__module__", None) or type(value).__module__
    return module.partition(".")[0] if isinstance(module, str) else None


class _Walk:
    """Computes digests recursively: the hash of a value's kind and of the digests of its parts."""

    def __init__(self, own_package: str | None, lasting: bool = False):
        self._own = {"t5x", "__main__", own_package} - set(sys.stdlib_module_names - {"__main__"})
        self._own -= {"t5x"} if lasting else set()
        self._lasting = lasting
        self._hashed: dict[int, bytes] = {}  # functions and classes only: they outlive the walk, so ids stay valid
        self._above: set[int] = set()

    def __call__(self, value: Any) -> bytes:
        if type(value) in _SCALARS:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._hashed:
            return self._hashed[id(value)]
        if id(value) in self._above:
            return _hash("itself")
        self._above.add(id(value))
        try:
            digest = self._compound(value)
        finally:
            self._above.remove(id(value))
        if isinstance(value, types.FunctionType | type):
            self._hashed[id(value)] = digest
        return digest

    def _all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _hash(kind, *(self(value) for value in values))

    def _compound(self, value: Any) -> bytes:
        match value:
            case types.FunctionType():
                return self._function(value)
            case types.CodeType():
                return self._code(value)
            case type():
                return self._class(value)
            case types.ModuleType():
                return _hash("module", value.__name__, self._version(value.__name__) or "")
            case types.MethodType():
                return self._all("method", (value.__func__, value.__self__))
            case types.BuiltinFunctionType():
                bound = None if isinstance(value.__self__, types.ModuleType) else value.__self__
                return _hash("builtin", self._place(value.__module__), value.__qualname__, self(bound))
            case functools.partial():
                return self._all("partial", (value.func, value.args, value.keywords))
            case staticmethod() | classmethod():
                return self(value.__func__)
            case property():
                return self._all("property", (value.fget, value.fset))
            case np.ndarray():
                content = self(value.tolist()) if value.dtype.hasobject else value.tobytes()
                return _hash("array", str(value.dtype), str(value.shape), content)
            case np.generic() | np.dtype():
                return _hash("numpy", type(value).__name__, str(value.dtype if hasattr(value, "dtype") else value),
                             repr(value))  # fmt: skip
        if type(value) in (list, tuple):
            return self._all(type(value).__name__, value)
        if type(value) in (dict, types.MappingProxyType):
            if self._lasting:
                return _hash("dict", *sorted(self._all("item", item) for item in value.items()))
            return self._all("dict", (part for item in value.items() for part in item))
        if type(value) in (set, frozenset):
            return _hash("set", *sorted(self(one) for one in value))
        return self._object(value)

    def _object(self, value: Any) -> bytes:
        if self._lasting and (isinstance(value, _GENERATORS) or value is os.environ):
            return self._all("opaque", (type(value),))
        if isinstance(getattr(value, "fingerprint", None), str):  # a vocabulary
            return _hash("fingerprint", type(value).__qualname__, value.fingerprint)
        if hasattr(value, "__wrapped__"):  # functools.cache
            return self(value.__wrapped__)
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # e.g. a lock or an open file: examples do not depend on it
            return self._all("opaque", (type(value),))
        if isinstance(reduced, str):
            return _hash("global", type(value).__module__, reduced)
        return self._all(
            "object",
            [type(value)] + [part if at < 3 else list(part or ()) for at, part in enumerate(reduced[:5]) if at],
        )

    def _function(self, function: types.FunctionType) -> bytes:
        version = self._version(function.__module__)
        inner = "<locals>" in function.__qualname__  # its closure has the outer function's arguments
        if version is not None and not (self._lasting and inner):
            return _hash("function", self._place(function.__module__), function.__qualname__, version)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # an empty cell
                cells.append(Ellipsis)
        given = (function.__defaults__, function.__kwdefaults__)
        if version is not None:
            return _hash("function", function.__qualname__, self._all("given", (given, cells)))
        names = _names(function.__code__) - _stored(function.__code__)
        found = [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]
        return _hash(
            "function",
            function.__qualname__,
            self(function.__code__),
            self._all("arguments", given),
            self._all("closure", cells),
            *(part for name, value in found for part in (name, self._global(value, names, frozenset()))),
        )

    def _global(self, value: Any, names: frozenset[str], above: frozenset[int]) -> bytes:
        """Return the digest of a global; of a followed module, only the members that the function may use."""
        if not isinstance(value, types.ModuleType) or self._version(value.__name__) is not None or id(value) in above:
            return self(value)
        members = [(name, vars(value)[name]) for name in sorted(names) if name in vars(value)]
        above = above | {id(value)}
        return _hash("module", *(part for name, one in members for part in (name, self._global(one, names, above))))

    def _code(self, code: types.CodeType) -> bytes:
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return _hash(
            "code", code.co_code, code.co_exceptiontable, self(_constants(code)), " ".join(code.co_names),
            " ".join(parameters), f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}",
            str(code.co_flags),
        )  # fmt: skip

    def _class(self, kind: type) -> bytes:
        version = "" if kind.__module__.partition(".")[0] == "t5x" else self._version(kind.__module__)
        if version is not None:
            return _hash("class", self._place(kind.__module__), kind.__qualname__, version)
        parts = [(name, value) for name, value in sorted(vars(kind).items()) if name not in _NOT_OF_A_CLASS]
        return _hash(
            "class",
            kind.__qualname__,
            self._all("bases", kind.__bases__),
            *(part for name, value in parts for part in (name, self(value))),
        )

    def _version(self, module: str | None) -> str | None:
        """Return the version of a module that is hashed by version; None for one that is followed."""
        top = (module or "").partition(".")[0]
        version = None if top in self._own else "" if top == "t5x" else _installed_version(top)
        return "" if self._lasting and version is not None else version

    def _place(self, module: str | None) -> str:
        """Return the module of an object; its package in lasting hashes, because modules may be renamed."""
        return (module or "").partition(".")[0] if self._lasting else module or ""


@functools.cache
def _installed_version(package: str) -> str | None:
    """Return the version of an installed package, "" for the standard library, None for neither."""
    if package in sys.stdlib_module_names:
        return ""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *map(str, getattr(module, "__path__", ()))]
    if not any(part in place for place in places for part in ("site-packages", "dist-packages")):
        return None
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """Return the constants of a code object, with None instead of a function's docstring."""
    # Functions and lambdas reserve the first constant for it; comprehensions and class bodies do not.
    is_documented = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in _COMPREHENSIONS
    if is_documented and code.co_consts and isinstance(code.co_consts[0], str):
        return (None, *code.co_consts[1:])
    return code.co_consts


def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and in its nested functions."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _stored(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function sets itself: state it stores, not inputs it depends on."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"]
    return frozenset(own).union(*(_stored(const) for const in code.co_consts if isinstance(const, types.CodeType)))


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        part = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
