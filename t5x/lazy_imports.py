"""Imports on first use, and of packages that may not be installed."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from t5x.errors import UserError


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
