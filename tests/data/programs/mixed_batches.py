"""A mixture of packed examples and joined documents, and a program that reads it until it is killed.

    python mixed_batches.py WORKERS < STATE.json

STATE is of the loader, or null. For each batch it prints a line: [its digest, the state behind it].
"""

import hashlib
import json
import random
import sys

import numpy as np

from t5x import data

LENGTHS = {"inputs": 40, "targets": 24}
BATCH = 8
VOCABULARY = data.ByteVocabulary(extra_ids=100)


def numbers(count, low, high, seed):
    rng = random.Random(seed)
    words = lambda: " ".join(str(rng.randrange(100)) for _ in range(rng.randint(low, high)))
    return [{"inputs": words(), "targets": words()} for _ in range(count)]


def drop_some(example, seed):
    return None if np.random.default_rng(seed).random() < 0.3 else example


def document(example):
    return {"targets": example["inputs"]}


def register(name="all", prefix=""):
    """A mixture of three tasks: short pairs, pairs of which many are dropped, and documents that are joined and
    corrupted. Its packed rows need every cursor."""
    features = {name: data.Feature(VOCABULARY) for name in ("inputs", "targets")}
    tokenize = [data.preprocessors.tokenize, data.preprocessors.append_eos]
    tasks = {
        "short": (numbers(50, 1, 3, 1), tokenize),
        "dropping": (numbers(31, 1, 5, 2), [drop_some, *tokenize]),
        "documents": (
            numbers(23, 1, 60, 3),
            [document, data.preprocessors.tokenize, data.preprocessors.span_corruption,
             data.preprocessors.append_eos_after_trim],
        ),
    }  # fmt: skip
    for task, (examples, preprocessors) in tasks.items():
        source = data.FunctionDataSource(lambda split, e=examples: e, splits=("train",))
        data.TaskRegistry.add(prefix + task, source, output_features=features, preprocessors=preprocessors)
    rates = {"short": 3.0, "dropping": 1.0, "documents": 2.0}
    return data.MixtureRegistry.add(name, [(prefix + task, rate) for task, rate in rates.items()])


def loader(rows=None, workers=0, pack=True, seed=7, name="all"):
    cfg = data.DatasetConfig(name, LENGTHS, "train", BATCH, shuffle=True, seed=seed, pack=pack, num_workers=workers)
    return data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter(pack=pack), rows=rows)


def digest(batch):
    whole = hashlib.sha256()
    for name, array in sorted(batch.items()):
        whole.update(name.encode() + array.tobytes())
    return whole.hexdigest()


def main(workers):
    register()
    state = json.load(sys.stdin)
    with loader(workers=int(workers)) as source:
        if state is not None:
            source.restore(state)
        for batch in source:
            print(json.dumps([digest(batch), source.state()]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
