"""Import modules that the user names (`--import`, a gin file's `import`) from the working directory, and no others.

The working directory is not on `sys.path`. If it were, a `json.py` or `seqio.py` there would be imported by t5x or by
any library that needs such a module. A finder that runs after all others looks there for the modules that the user
names, and for modules that these import. Installed modules take precedence.
"""

import importlib
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from t5x._runtime.errors import UserError, did_you_mean, display_path

logger = logging.getLogger(__name__)

_INSTALL_TF = "Run `pip install -e '.[tf]'` in the checkout of t5x (docs/seqio.md)"
INSTALL_T5 = (
    f"{_INSTALL_TF}, then `pip install --no-deps t5==0.9.4` and `pip install babel editdistance nltk pandas "
    "rouge-score scikit-learn`."
)
_HINTS = {
    "seqio": f"Write `from t5x import data as seqio` instead. For the real seqio: {_INSTALL_TF}.",
    "t5": INSTALL_T5,
    "tensorflow": f"{_INSTALL_TF}.",
    "tensorflow_datasets": f"{_INSTALL_TF}.",
    "tensorflow_text": f"{_INSTALL_TF}.",
}
# {module: what stands in for it if it, or a package that it needs, is not installed}
_FALLBACKS = dict.fromkeys(("t5", "t5.data", "t5.data.mixtures", "t5.data.tasks"), "t5x.examples.t5_tasks")
_IMPORT_SYSTEM = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


class _Finder:
    """A finder of top-level modules in users' directories, for allowed names and for imports in such modules.

    Attributes:
      directories: where to look, in this order.
      named: top-level modules that the user asks for.
      loaded: modules found in the directories: named ones, and those that they import.
    """

    def __init__(self):
        self.directories: list[str] = []
        self.named: set[str] = set()
        self.loaded: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or not (name in self.named | self.loaded or _importing_package() in self.loaded):
            return None
        spec = PathFinder.find_spec(name, self.directories)
        if spec is not None:
            self.loaded.add(name)
        return spec

    def allow(self, directories: Iterable[str]) -> None:
        directories = list(directories)
        self.directories = directories + [known for known in self.directories if known not in directories]
        if self not in sys.meta_path:
            sys.meta_path.append(self)


_finder = _Finder()


def _importing_package() -> str:
    """Return the top-level package of the code that executes the import."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _IMPORT_SYSTEM:
            return package
        frame = frame.f_back
    return ""


def import_module(name: str) -> ModuleType:
    """Import a module that the user names: an installed one, or else one in the working directory."""
    allow(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name not in _FALLBACKS:
            raise
        logger.info("%s needs %s, which is not installed: using %s instead", name, error.name, _FALLBACKS[name])
        return importlib.import_module(_FALLBACKS[name])


def allow(name: str, *directories: str) -> None:
    """Let `import name`, and imports in that module, find modules in these directories and the working directory."""
    _finder.named.add(name.partition(".")[0])
    _finder.allow(dict.fromkeys([*directories, os.getcwd()]))
    importlib.invalidate_caches()


def explain(error: Exception) -> str:
    """Return what went wrong when a module of the user was imported, where, and how to fix it."""
    if isinstance(error, UserError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    in_module = frames[-1].filename not in (__file__, importlib.__file__)
    position = f" ({display_path(frames[-1].filename)}:{frames[-1].lineno})" if in_module else ""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"{type(error).__name__}: {error}{position}."
    package = error.name.partition(".")[0]
    hint = f" {_HINTS[package]}" if package in _HINTS else "" if in_module else _suggest_module(error.name)
    return f"there is no module {error.name!r}{position}.{hint}"


def _suggest_module(missing: str) -> str:
    """Return a sentence, after a space, on what to import instead of a module that does not exist."""
    parent, _, name = missing.rpartition(".")
    package = sys.modules.get(parent)
    if hasattr(package, name):
        return f" Import `{parent}` and write {parent.rpartition('.')[2]}.{name}."
    path = getattr(package, "__path__", ()) if parent else [*sys.path, *_finder.directories]
    suggestion = did_you_mean(name, [module.name for module in pkgutil.iter_modules(path)])
    return suggestion or " Install its package, start t5x in its directory, or name a .py file with --import."


def trust(module: str) -> None:
    """Let a module that was loaded from a file import others from the users' directories."""
    _finder.loaded.add(module)


def snapshot() -> tuple[list[str], list[str]]:
    """Return the state with which `restore` finds the same modules in another process."""
    return list(_finder.directories), sorted(_finder.loaded)


def restore(state: tuple[list[str], list[str]]) -> None:
    """Find the same modules as the process that took the `snapshot`."""
    paths, modules = state
    _finder.loaded.update(modules)
    if paths:
        _finder.allow(paths)


def lazy_attributes(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose modules are imported when they are first used.

    Args:
      modules: its modules, and names of each that are also names of the package.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules, *module_of})


def import_extra(module: str, needs: str) -> ModuleType:
    """Import a module that may not be installed; raise a UserError that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{needs} ({error}).") from error


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    import importlib.metadata  # not needed to start a command

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
