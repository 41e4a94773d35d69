"""Tasks for training.py, from the files T5X_BENCH_TEXT (one document per line) and T5X_BENCH_VOCABULARY.

`bench_full` is span corruption with full rows. `bench_short` has one example per document, which predicts its end from
its beginning; several are packed into a row.
"""

import functools
import os

from t5x import data
from t5x.data import preprocessors

_SHARE = 0.8  # of a document, for the input


def _split(example):
    words = example["text"].split()
    cut = int(_SHARE * len(words))
    if 0 < cut < len(words):
        yield {"inputs": " ".join(words[:cut]), "targets": " ".join(words[cut:])}


_vocabulary = data.SentencePieceVocabulary(os.environ["T5X_BENCH_VOCABULARY"], extra_ids=100)
_source = data.TextLineDataSource({"train": os.environ["T5X_BENCH_TEXT"]})
_features = {name: data.Feature(_vocabulary) for name in ("inputs", "targets")}
_end = [preprocessors.append_eos_after_trim]

data.TaskRegistry.add(
    "bench_full",
    source=_source,
    preprocessors=[
        functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
        preprocessors.tokenize,
        preprocessors.span_corruption,
        *_end,
    ],
    output_features=_features,
)
data.TaskRegistry.add(
    "bench_short", source=_source, preprocessors=[_split, preprocessors.tokenize, *_end], output_features=_features
)
