"""What `import optax` means in gin files: Optax, with functions that record their learning rates."""

import inspect
import types
from typing import Any

import optax

from t5x.optimizers.applied_learning_rate import record_learning_rates


def _recording(module: types.ModuleType) -> types.ModuleType:
    """Return a view of `module` and its submodules whose functions record their learning rates."""

    def get(name: str) -> Any:
        value = getattr(module, name)
        if inspect.ismodule(value):
            return _recording(value)
        return record_learning_rates(value) if inspect.isfunction(value) else value

    view = types.ModuleType(module.__name__)
    view.__getattr__ = get
    view.__dir__ = lambda: dir(module)
    return view


_optax = _recording(optax)
__getattr__ = _optax.__getattr__
__dir__ = _optax.__dir__
