"""Import names of a package on first use."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def lazy_attributes(package: str, module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports `names` from `module` when they are first used."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    return get
