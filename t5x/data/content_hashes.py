"""Hashes of Python functions and values: equal in every process, different if the results may differ.

A function is hashed by the syntax tree of its source, its defaults, its closure and the globals that it reads,
recursively. Functions and classes of the standard library and of installed packages are hashed by their name and the
package's version. Those in the user's own files and in the package of the value passed to `fingerprint` are followed,
and so are functions of t5x; classes of t5x are hashed by name. Names are qualified by package, not by module, because
code moves. Line numbers, comments, docstrings, annotations and names of local variables do not count.

These hashes are the same under every supported version of Python. The exception is code without source (`exec`), or
whose file was edited after its import: it is hashed by its bytecode, and so are classes whose attributes differ between
versions (enums). The hash then ends with that version: see `same_code`.

A checkpoint outlives versions of packages, including t5x. In the hashes that it stores (`lasting`), functions and
classes of packages and of t5x are hashed by their name, arguments and closures. Versions, the order of a dict's items,
and the states of random generators do not count there.
"""

import ast
import contextlib
import copyreg
import dis
import enum
import functools
import hashlib
import json
import linecache
import os
import random
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, BinaryIO

import numpy as np

from t5x._runtime import imports
from t5x._runtime.errors import UserError
from t5x.files import atomic, cache_directory
from t5x.files.local_copies import LocalCopy

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_NOT_OF_A_CLASS = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
    "__slotnames__", "__parameters__", "__dataclass_params__", "__replace__",
}  # fmt: skip
_IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_params", "returns"}


def fingerprint(value: Any, *, lasting: bool = False) -> str:
    """Return the hash of a value, in hexadecimal, and the version of Python if it depends on that.

    Args:
      lasting: for comparison after upgrades, see above.
    """
    walk = _Walk(_package_of(value), lasting)
    digest = walk(value).hex()
    return f"{digest} {_PYTHON}" if walk.depends_on_python else digest


def same_code(one: str, other: str) -> bool:
    """Return whether two hashes are equal, or cannot be compared because they belong to two versions of Python."""
    versions = [digest.partition(" ")[2] for digest in (one, other)]
    return one == other or (all(versions) and versions[0] != versions[1])


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
        self.depends_on_python = False

    def __call__(self, value: Any) -> bytes:
        if type(value) in _SCALARS:
            return _hash(type(value).__name__, ascii(value))
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
                package = _package(value.__name__)
                return _hash("module", package if package == "t5x" else value.__name__,
                             self._version(value.__name__) or "")  # fmt: skip
            case types.MethodType():
                return self._all("method", (value.__func__, value.__self__))
            case types.BuiltinFunctionType():
                bound = None if isinstance(value.__self__, types.ModuleType) else value.__self__
                return _hash("builtin", _package(value.__module__), value.__qualname__, self(bound))
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
            reduce = copyreg.dispatch_table.get(type(value))  # of regular expressions
            reduced = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception:  # e.g. a lock or an open file: examples do not depend on it
            return self._all("opaque", (type(value),))
        if isinstance(reduced, str):
            return _hash("global", _package(type(value).__module__), reduced)
        arguments, *items = reduced[1:5]
        return self._all("object", (type(value), arguments, *items[:1], *(list(item or ()) for item in items[1:])))

    def _function(self, function: types.FunctionType) -> bytes:
        version = self._version(function.__module__)
        inner = "<locals>" in function.__qualname__  # its closure has the outer function's arguments
        if version is not None and not (self._lasting and inner):
            return _hash("function", _package(function.__module__), function.__qualname__, version)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # an empty cell
                cells.append(Ellipsis)
        defaults = (function.__defaults__, function.__kwdefaults__)
        if version is not None:
            return _hash("function", function.__qualname__, self._all("given", (defaults, cells)))
        code = function.__code__
        names = _names(code) - _stored(code)
        used = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
        digests = {name: self._global(value, names, frozenset()) for name, value in used.items()}
        if node := _node_of(code):
            modules = [name for name, value in used.items() if isinstance(value, types.ModuleType)]
            aliases = {name: digests.pop(name).hex() for name in modules}
            body = _hash("source", ascii(_canonical_function(node, used.keys(), aliases)))
        else:
            self.depends_on_python = True
            body = self(code)
        return _hash(
            "function",
            function.__qualname__,
            body,
            self._all("arguments", defaults),
            self._all("closure", cells),
            *(part for name, digest in digests.items() for part in (name, digest)),
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
            "code", code.co_code, code.co_exceptiontable, self(code.co_consts), " ".join(code.co_names),
            " ".join(parameters), f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}",
            str(code.co_flags),
        )  # fmt: skip

    def _class(self, kind: type) -> bytes:
        version = "" if _package(kind.__module__) == "t5x" else self._version(kind.__module__)
        if version is not None:
            return _hash("class", _package(kind.__module__), kind.__qualname__, version)
        self.depends_on_python |= issubclass(kind, enum.Enum)
        parts = [
            (name, value) for name, value in sorted(vars(kind).items())
            if name not in _NOT_OF_A_CLASS and not _is_generated(value)
        ]  # fmt: skip
        return _hash(
            "class",
            kind.__qualname__,
            self._all("bases", kind.__bases__),
            *(part for name, value in parts for part in (name, self(value))),
        )

    def _version(self, module: str | None) -> str | None:
        """Return the version of a module that is hashed by version; None for one that is followed."""
        top = _package(module)
        version = None if top in self._own else "" if top == "t5x" else _installed_version(top)
        return "" if self._lasting and version is not None else version


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_generated(value: Any) -> bool:
    """Return whether a method was written by `dataclass`, from the fields."""
    code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
    return code is not None and code.co_qualname.startswith("__create_fn__.")


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
    return imports.installed_version(package) or ""


def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and in its nested functions."""
    names = {name for nested in _nested(code) for name in nested.co_names}
    return frozenset(names - {"__name__", "__file__", "__package__", "__spec__", "__doc__"})  # they change with a move


def _stored(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function sets itself: state it stores, not inputs it depends on."""
    steps = [step for nested in _nested(code) for step in dis.get_instructions(nested)]
    return frozenset(step.argval for step in steps if step.opname == "STORE_GLOBAL")


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


# --- Source -----------------------------------------------------------------------------------------------------------


def _node_of(code: types.CodeType) -> ast.AST | None:
    """Return the syntax tree of a function, or None if there is no source or it is not the source of this code."""
    linecache.checkcache(code.co_filename)
    nodes, codes = _parsed("".join(linecache.getlines(code.co_filename)), code.co_filename)
    if code not in codes:
        return None
    matching = nodes.get((code.co_name, code.co_firstlineno), [])
    if len(matching) > 1:  # lambdas of one line: of those that enclose all instructions, the innermost is last
        columns = {p for p in code.co_positions() if None not in p and p[2:] != (0, 0)}  # (0, 0): not of the body
        constants = [ascii(value) for value in code.co_consts]  # 3.12 locates no instruction of `lambda: True`
        matching = [
            node for node in matching
            if (all(_encloses(node.body, position) for position in columns) if columns
                else isinstance(node.body, ast.Constant) and ascii(node.body.value) in constants)
        ][-1:]  # fmt: skip
    return matching[0] if matching else None


@functools.lru_cache(maxsize=64)
def _parsed(text: str, path: str) -> tuple[dict[tuple[str, int], list[Any]], set[types.CodeType]]:
    """Return the functions in a file's source: {(name, first line): syntax trees}, and their compiled code."""
    nodes: dict[tuple[str, int], list[Any]] = {}
    try:
        tree, module = ast.parse(text), compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return nodes, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            line = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            nodes.setdefault((getattr(node, "name", "<lambda>"), line), []).append(node)
    return nodes, set(_nested(module))


def _encloses(node: Any, position: Any) -> bool:
    line, end_line, column, end_column = position
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return start <= (line, column) and (end_line, end_column) <= end


def _canonical_function(node: Any, global_names: Set[str], aliases: Mapping[str, str]) -> tuple[Any, ...]:
    """Return a function's syntax tree as nested tuples that are the same under every version of Python.

    `ast.dump` is not: 3.12 adds `type_params`, and 3.13 omits empty lists. Names of local variables are replaced by
    numbers, except for parameters.

    Args:
      global_names: names of globals that the function reads.
      aliases: what replaces the names of modules, which may be imported under any name.
    """
    numbers: dict[str, int] = {}
    local = _local_names(node) - global_names

    def canonical(value: Any) -> Any:
        if isinstance(value, list):
            return [canonical(child) for child in value]
        if not isinstance(value, ast.AST):
            return ascii(value)
        fields = {name: child for name in value._fields if (child := getattr(value, name, None)) not in (None, [])}
        match value:
            case ast.Name(id=name) if name in local:
                return "local", numbers.setdefault(name, len(numbers))
            case ast.Name(id=name):
                return "Name", aliases.get(name, name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if ast.get_docstring(value) is not None:
                fields["body"] = value.body[1:]
            case ast.JoinedStr():  # 3.12 ends nested format specifications with an empty string
                fields["values"] = [v for v in value.values if not (isinstance(v, ast.Constant) and v.value == "")]
            case ast.arg():
                fields.pop("annotation", None)
            case ast.ImportFrom(module=str(module)) if _package(module) == "t5x":
                fields["module"] = "t5x"
        return type(value).__name__, *((k, canonical(v)) for k, v in sorted(fields.items()) if k not in _IGNORED_FIELDS)

    parameters = ast.arguments(**vars(node.args) | {"defaults": [], "kw_defaults": []})  # hashed by their values
    body = node.body
    if isinstance(body, list):
        body = body[ast.get_docstring(node) is not None :]
    return type(node).__name__, canonical(parameters), canonical(body)


def _local_names(node: ast.AST) -> set[str]:
    """Return the names that only assignments, loops and the like in a function bind."""
    stored, otherwise = set(), set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            stored |= {child.id} if isinstance(child.ctx, ast.Store) else set()
        elif isinstance(child, ast.ClassDef):
            otherwise |= {name.id for name in ast.walk(child) if isinstance(name, ast.Name)}
        elif not isinstance(child, ast.Constant):  # names of parameters, imports, attributes, ...
            for _, value in ast.iter_fields(child):
                values = value if isinstance(value, list) else [value]
                otherwise |= {name for name in values if isinstance(name, str)}
    return stored - otherwise


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        part = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


_ALWAYS_WHOLE = 64 * 2**20
_ALL_WHOLE = 8 * 2**30
_BLOCKS, _BLOCK = 64, 64 * 2**10
_WORTH_KEEPING = 2**20
_LISTED = 256
_blake2b = functools.partial(hashlib.blake2b, digest_size=16)
_SETTLED = 2 * 10**9  # nanoseconds after which a new write gets a new time on any file system


def hash_data_files(copies: Sequence[LocalCopy]) -> list[list[Any]]:
    """Return [name, size, digest] of each file; one entry for all if there are very many."""
    sizes = [os.path.getsize(copy.path) for copy in copies]
    all_whole = sum(sizes) <= _ALL_WHOLE
    described: list[list[Any]] = [
        [os.path.basename(copy.name), size, _digest(copy.path, whole=all_whole or size <= _ALWAYS_WHOLE)]
        for copy, size in zip(copies, sizes, strict=True)
    ]
    if len(described) <= _LISTED:
        return described
    joined = _blake2b("".join(digest for _, _, digest in described).encode()).hexdigest()
    return [[f"{described[0][0]} and {len(described) - 1} more", sum(sizes), joined]]


def _digest(path: str, whole: bool) -> str:
    """Return the digest of a file's content, from the cache directory if known."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        # Writing changes the ctime, even if the mtime is reset.
        stamp = [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, whole]
        keep = status.st_size >= _WORTH_KEEPING and time.time_ns() - status.st_ctime_ns > _SETTLED
        if keep and (saved := _load(stamp)) is not None:
            return saved
        digest = hashlib.file_digest(file, _blake2b) if whole else _sampled(file, status.st_size)
    if keep:
        _save(stamp, digest.hexdigest())
    return digest.hexdigest()


def _sampled(file: BinaryIO, size: int) -> Any:
    digest = _blake2b(str(size).encode())
    for number in range(_BLOCKS):
        file.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK))
    return digest


def _record_path(stamp: list[Any]) -> str:
    return os.path.join(cache_directory.place("data/digests"), f"{cache_directory.short_hash(stamp[0])}.json")


def _load(stamp: list[Any]) -> str | None:
    try:
        with open(_record_path(stamp)) as file:
            record = json.load(file)
        return record["digest"] if record["stamp"] == stamp and isinstance(record["digest"], str) else None
    except (OSError, UserError, ValueError, KeyError, TypeError):
        return None


def _save(stamp: list[Any], digest: str) -> None:
    with contextlib.suppress(OSError, UserError):  # it will be computed again
        path = _record_path(stamp)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic.new_file(path) as file:
            file.write(json.dumps({"stamp": stamp, "digest": digest}).encode())
