"""t5x: train, fine-tune, evaluate, run and export T5-family models in JAX.

Importing the package imports neither JAX nor Flax, so that `t5x --help` answers at once. Import the modules that
you need: `from t5x import models, partitioning, trainer, utils`.
"""

from __future__ import annotations

import sys

# `python -m t5x` puts the working directory first on the path, where a user's json.py would take the place of Python's.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "t5x":
    del sys.path[: not sys.flags.safe_path]

import os

from t5x._runtime import __version__ as __version__

TYPE_CHECKING = False  # without the import of `typing`: until the program handles signals, Ctrl-C shows a traceback
if TYPE_CHECKING:
    from typing import Any

    from t5x.apps.python_api import Generation as Generation
    from t5x.apps.python_api import Model as Model
    from t5x.apps.python_api import load as load
    from t5x.apps.python_api import pipeline as pipeline

# Remote paths are opened with fsspec. Where TensorFlow happens to be installed, etils would import all of it for them.
os.environ.setdefault("EPATH_USE_TF", "false")


# Modules that are attributes after `import t5x` alone, as in T5X.
_MODULES = (
    "adafactor", "checkpoints", "config_utils", "decoding", "errors", "gin_utils", "losses", "models", "partitioning",
    "state_utils", "train_state", "trainer", "utils",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"t5x.{name}")
    if name not in ("Generation", "Model", "load", "pipeline"):
        raise AttributeError(f"module 't5x' has no attribute {name!r}")
    from t5x._runtime.signals import delay_interrupts

    with delay_interrupts():
        from t5x.apps import python_api

    return getattr(python_api, name)
