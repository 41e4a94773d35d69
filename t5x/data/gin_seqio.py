"""The module that `import seqio` means in gin files: our classes, and the rest of an installed seqio.

The classes in `OURS` are ours whether or not seqio is installed, so that a gin file builds the same run either way.
Other names come from seqio, which is imported only for them, or from `t5x.data` if seqio is not installed. seqio
exports everything in `SUBMODULES` at its top level, so these are equivalent.
"""

import importlib
import importlib.util
import sys
from typing import Any

from t5x import data

OURS = (
    *("Evaluator", "JSONLogger", "PyLoggingLogger", "TensorBoardLogger"),
    *("ByteVocabulary", "PassThroughVocabulary", "SentencePieceVocabulary", "Feature"),
    *("DecoderFeatureConverter", "EncDecFeatureConverter", "EncoderFeatureConverter", "LMFeatureConverter"),
    *("PassThroughFeatureConverter", "PrePackedEncDecFeatureConverter", "PrefixLMFeatureConverter"),
)
SUBMODULES = ("evaluation", "feature_converters", "loggers", "vocabularies")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in SUBMODULES:
        return sys.modules[__name__]
    return getattr(data if name in OURS else _rest(), name)


def __dir__() -> list[str]:
    return [*OURS, *dir(_rest())]


def _rest() -> Any:
    return importlib.import_module("seqio") if importlib.util.find_spec("seqio") else data
