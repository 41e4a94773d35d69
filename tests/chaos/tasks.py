"""A mixture whose tasks drop examples, join documents and differ in length: its packed rows need every cursor."""

import random

import numpy as np

from t5x import data

VOCABULARY = data.ByteVocabulary(extra_ids=100)


def _numbers(count: int, low: int, high: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    words = lambda: " ".join(str(rng.randrange(100)) for _ in range(rng.randint(low, high)))
    return [{"inputs": words(), "targets": words()} for _ in range(count)]


def drop_some(example, seed):
    return None if np.random.default_rng(seed).random() < 0.3 else example


def document(example):
    return {"targets": example["inputs"]}


def _add(name: str, examples: list[dict[str, str]], *preprocessors) -> None:
    source = data.FunctionDataSource(lambda split: examples, splits=("train",))
    features = {feature: data.Feature(VOCABULARY) for feature in ("inputs", "targets")}
    data.TaskRegistry.add(name, source, output_features=features, preprocessors=preprocessors)


_tokenize = (data.preprocessors.tokenize, data.preprocessors.append_eos)
_add("chaos_short", _numbers(50, 1, 3, 1), *_tokenize)
_add("chaos_dropping", _numbers(31, 1, 5, 2), drop_some, *_tokenize)
_add(
    "chaos_documents",
    _numbers(23, 1, 60, 3),
    document,
    data.preprocessors.tokenize,
    data.preprocessors.span_corruption,
    data.preprocessors.append_eos_after_trim,
)
data.MixtureRegistry.add("chaos", [("chaos_short", 3.0), ("chaos_dropping", 1.0), ("chaos_documents", 2.0)])
