"""What `import optax` means in gin files: Optax, with functions that record their learning rates."""

import inspect
import types
from typing import Any

import optax

from t5x.optimizers.schedules import record_learning_rates


class _Recording(types.ModuleType):
    """A view of `module` and its submodules whose functions record their learning rates."""

    def __init__(self, module: types.ModuleType):
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if inspect.ismodule(value):
            return _Recording(value)
        return record_learning_rates(value) if inspect.isfunction(value) else value

    def __dir__(self) -> list[str]:
        return dir(self._module)


_optax = _Recording(optax)
__getattr__ = _optax.__getattr__
__dir__ = _optax.__dir__
