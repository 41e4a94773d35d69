"""Trains on seqio's tasks, resumes a copy of the run, predicts from seqio's offline cache, and asks seqio itself.

    python seqio_runs.py JOB.json RESULTS.json

JOB is {"runs": [[verb, arguments], …] of t5x, "cache": directory for the offline cache, "copies": {model directory: its
copy} made after the first run, "without": a file or directory that the copies lack}.
"""

import json
import os
import shutil
import sys

import numpy as np
import seqio
import seqio_tasks  # noqa: F401
import tensorflow as tf

from t5x import checkpoints, configuration, data, models, optimizers
from t5x._runtime.errors import UserError
from t5x.cli.cache_verb import cache_tasks
from t5x.cli.data_report import DataReport
from t5x.cli.main import run_verb
from t5x.cli.text_page import TextPage
from t5x.compat import test_utils
from t5x.data import seqio_bridge
from t5x.partitioning import PjitPartitioner

LENGTHS = {"inputs": 32, "targets": 11}


def write_offline_cache(directory):
    """As seqio_cache_tasks lays it out."""
    os.makedirs(directory)
    shapes = {"inputs": [None], "targets": [None], "inputs_pretokenized": [], "targets_pretokenized": []}
    features = {name: {"dtype": "int32" if shape else "string", "shape": shape} for name, shape in shapes.items()}
    with tf.io.TFRecordWriter(f"{directory}/validation.tfrecord-00000-of-00001") as writer:
        for i in range(3):
            texts = {"inputs": f"cached {i}", "targets": f"{i}"}
            example = tf.train.Example()
            for name, text in texts.items():
                ids = seqio.ByteVocabulary().encode(text)
                example.features.feature[name].int64_list.value.extend(ids)
                example.features.feature[f"{name}_pretokenized"].bytes_list.value.append(text.encode())
            writer.write(example.SerializeToString())
    info = {"features": features, "num_shards": 1, "seqio_version": seqio.__version__}
    for name, content in {"info.validation.json": info, "stats.validation.json": {"examples": 3}}.items():
        with open(f"{directory}/{name}", "w") as file:
            json.dump(content, file)
    open(f"{directory}/COMPLETED", "w").close()


def predicted(targets):
    """Right where the ids add up to an even number, else nothing."""
    return np.where(targets.sum(-1, keepdims=True) % 2 == 0, targets, 0)


def metrics():
    """(ours, seqio's) for the same predictions."""
    ours = data.Evaluator("questions", data.EncDecFeatureConverter(pack=False), sequence_length=LENGTHS, batch_size=4)
    mine = ours.evaluate(
        step=0,
        predict_fn=lambda batch: predicted(batch["decoder_target_tokens"]),
        score_fn=lambda batch: -batch["decoder_target_tokens"].sum(-1).astype(np.float32),
    )
    converter = seqio.EncDecFeatureConverter(pack=False)
    theirs = seqio.Evaluator("questions", converter, sequence_length=LENGTHS, seed=None)
    targets = lambda dataset: [(int(i), row["decoder_target_tokens"]) for i, row in dataset.as_numpy_iterator()]
    asked, _ = theirs.evaluate(
        compute_metrics=True,
        step=0,
        predict_fn=lambda dataset: [(i, predicted(row).tolist()) for i, row in targets(dataset)],
        score_fn=lambda dataset: [(i, float(-row.sum())) for i, row in targets(dataset)],
    )
    numbers = {k: float(getattr(v, "value", v)) for k, v in asked.result()["questions"].items() if k != "note"}
    return mine["questions"], numbers


def examples(name, split, seed):
    """(ours, seqio's), with ids as lists and texts as text."""
    pipeline = data.get_mixture_or_task(name).pipeline(split, LENGTHS, seed)
    ours = [example for i in range(len(pipeline)) for example in pipeline.outputs(0, i)]
    theirs = seqio.get_mixture_or_task(name).get_dataset(LENGTHS, split, shuffle=False, seed=seed)
    return [[listed(example) for example in side] for side in (ours, theirs.as_numpy_iterator())]


def listed(example):
    made = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in example.items()}
    plain = lambda value: value.decode() if isinstance(value, bytes) else value
    return {
        name: [plain(v) for v in value] if isinstance(value, list) else plain(value) for name, value in made.items()
    }


def message(function, *args):
    try:
        function(*args)
    except UserError as error:
        return str(error)
    return None


def pipeline(name):
    return data.get_mixture_or_task(name).pipeline("train", LENGTHS, 0)


def viewed(name, lengths):
    lines = []
    DataReport(TextPage(80, write=lines.append), data.get_mixture_or_task(name), lengths=lengths).write(1)
    return lines


def position_of_tf_data(directory):
    """Return what an iterator of tf.data yields after a save, then what two yield that are restored from it."""
    state = test_utils.make_train_state_base(
        step=np.int32(42), params={"x": np.ones(3)}, param_states={}, flax_optimizer_def=optimizers.sgd(0.1)
    )
    dataset = tf.data.Dataset.range(100).shuffle(10, seed=1)
    checkpointer = lambda iterator: checkpoints.Checkpointer(state, PjitPartitioner(), directory, iterator)
    first, second = iter(dataset), iter(dataset)
    for _ in range(3):
        next(first)
    checkpointer(first).save(state)
    checkpointer(second).restore(step=42)
    handler = checkpoints.DatasetCheckpointHandler("position.json", should_write_dataset_ckpt=True)
    handler.save(directory, first)
    third = handler.restore(directory, iter(dataset))
    return [[int(next(iterator)) for _ in range(20)] for iterator in (first, second, third)]


def main(job_file, results_file):
    with open(job_file) as file:
        job = json.load(file)
    write_offline_cache(f"{job['cache']}/only_cached")
    codes = []
    for verb, arguments in job["runs"]:
        configuration.clear()
        seqio_bridge._bridged.clear()  # as a new process: examples are found where they are staged
        codes.append(run_verb(verb, arguments))
        print("=== end of run ===", file=sys.stderr)
        for source, copy in job["copies"].items():
            if not os.path.isdir(copy):
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns(job["without"]))
    rates = {task.name: rate for task, rate in data.tasks.task_rates(data.get_mixture_or_task("both")).items()}
    both = seqio.get_mixture_or_task("both")
    model = models.EncoderDecoderModel(None, seqio.ByteVocabulary(), seqio.ByteVocabulary(3), optimizer_def=None)
    results = {
        "codes": codes,
        "metrics": metrics(),
        "lines": [examples("lines", "train", seed) for seed in (0, 1)],
        "rates": [rates, {task.name: both.get_rate(task) for task in both.tasks}],
        "unknown": message(pipeline, "qestions"),
        "endless": message(pipeline, "endless"),
        "cache": [message(cache_tasks, "lines"), message(cache_tasks, "both")],
        "viewed": [viewed("needs_lengths", lengths) for lengths in (None, LENGTHS)],
        "tf_data": position_of_tf_data("tf_data"),
        "vocabularies": [repr(vocabulary) for vocabulary in model.vocabularies.values()],
    }
    with open(results_file, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
