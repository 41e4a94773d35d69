"""Tasks of the projects: sums as bytes, and vectors to classify."""

import functools

import numpy as np

try:
    import seqio
except ImportError:
    from t5x import data as seqio

VOCABULARY = seqio.ByteVocabulary()


def vocabulary():
    return VOCABULARY


def sums(split):
    shift = {"train": 0, "validation": 1}[split]
    return [{"inputs": f"{a}+{a + shift}", "targets": str(2 * a + shift)} for a in range(1, 9)]


def vectors(split):
    rng = np.random.default_rng({"train": 0, "validation": 1}[split])
    made = rng.normal(size=(8, 5, 6)).astype(np.float32)
    return [{"inputs": x, "targets": np.array([3 + int(x.sum() > 0), 1], np.int32)} for x in made]


def accuracy(targets, predictions):
    return {"accuracy": 100.0 * np.mean([np.array_equal(t, p) for t, p in zip(targets, predictions, strict=True)])}


def scored(targets, scores):
    return {"mean_score": float(np.mean(scores))}


SOURCE = functools.partial(seqio.FunctionDataSource, splits=("train", "validation"))
TEXT = {"inputs": seqio.Feature(VOCABULARY), "targets": seqio.Feature(VOCABULARY)}
seqio.TaskRegistry.add(
    "project_sums", SOURCE(sums), TEXT, [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    metric_fns=[accuracy, scored],
)  # fmt: skip
IDS = seqio.PassThroughVocabulary(384, eos_id=1)
seqio.TaskRegistry.add(
    "project_vectors", SOURCE(vectors), {
        "inputs": seqio.Feature(IDS, add_eos=False, dtype=np.float32, rank=2),
        "targets": seqio.Feature(IDS, add_eos=False),
    }, [], metric_fns=[accuracy],
)  # fmt: skip


def ids():
    return IDS


seqio.TaskRegistry.add(
    "project_pairs", SOURCE(sums), TEXT, [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    metric_fns=[scored],
)  # fmt: skip
