"""t5x: train, fine-tune, evaluate, run and export T5-family models in JAX.

Importing the package imports neither JAX nor Flax, so that `t5x --help` answers at once. Import the modules that
you need: `from t5x import models, partitioning, trainer, utils`.
"""

from __future__ import annotations

import sys

# `python -m t5x` puts the working directory first on the path, where a user's json.py would take the place of Python's.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "t5x":
    del sys.path[: not sys.flags.safe_path]

import functools
import os

from t5x._runtime.version import __version__ as __version__

TYPE_CHECKING = False  # without the import of `typing`: until the program handles signals, Ctrl-C shows a traceback
if TYPE_CHECKING:
    from typing import Any

    from t5x.inference.loaded import LoadedModel

# Remote paths are opened with fsspec. Where TensorFlow happens to be installed, etils would import all of it for them.
os.environ.setdefault("EPATH_USE_TF", "false")


def __getattr__(name: str) -> Any:
    if name not in ("Generation", "pipeline"):
        raise AttributeError(f"module 't5x' has no attribute {name!r}")
    from t5x.apps import python_api

    return getattr(python_api, name)


def load(model_dir: str, **options: Any) -> LoadedModel:
    """Load the model of a checkpoint of any format, or of a MODEL_DIR, to generate, score, rank and answer.

        model = t5x.load("runs/demo")
        print(model.generate("the third of March '97").text)

    Args:
      model_dir: a path, an id of the Hugging Face Hub (`google/flan-t5-small`), or another name of a checkpoint: see
        `t5x.checkpoints.names`.
      options: `vocabulary`, `dtype`, `device` and `partitioner`, see `t5x.inference.loaded.load`.
    """
    from t5x._runtime.signals import delay_interrupts

    with delay_interrupts():
        from t5x.inference import loaded
        from t5x.partitioning import process_setup

    process_setup.enable_compilation_cache()
    return loaded.load(model_dir, **options, model_class=_model_class())


@functools.cache
def _model_class() -> type[LoadedModel]:
    from t5x.apps.answering.answers import AnswerMethods
    from t5x.apps.ranking.reranker import RankMethods
    from t5x.inference.loaded import LoadedModel

    class Model(RankMethods, AnswerMethods, LoadedModel):
        """A `LoadedModel` that also ranks passages, answers questions and saves itself."""

        def save(self, path: str, *, to: str = "hf", dtype: str | None = None, overwrite: bool = False) -> None:
            """Save the model to a new directory.

                model.save("flan")                  # for transformers; t5x loads it too

            Args:
              to: `hf` (Hugging Face), `t5x` (ours) or `native` (T5X).
              dtype: `float32` or `bfloat16` for the parameters; None keeps theirs.
              overwrite: replace an existing directory.
            """
            from t5x.checkpoints.convert import convert

            convert(self.source, path, to=to, dtype=dtype, overwrite=overwrite)

    return Model
