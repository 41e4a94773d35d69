"""Imports of packages that only some exports need."""

import importlib
from types import ModuleType

from t5x.errors import UserError


def import_extra(module: str, fix: str) -> ModuleType:
    """Import a module; raise a UserError with `fix`, how to install it, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{fix} ({error}).") from error
