"""Imports on first use, and imports that Ctrl-C does not interrupt."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def lazy_attributes(package: str, module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports `names` from `module` when they are first used."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    return get


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C while modules are imported. An exception that is raised as an extension starts makes it crash."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
