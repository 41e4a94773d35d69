"""Describes tasks of the package t5 and applies their first preprocessor: `t5_task_examples.py JOBS.json ANSWERS.json`.

JOBS.json: {task: a raw example}. ANSWERS.json: {task: its dataset, features, number of metrics, and the texts of the
example}, or null if t5 cannot be imported.
"""

import json
import sys
from pathlib import Path

import seqio
import tensorflow as tf

try:
    import t5.data.mixtures  # noqa: F401
except ModuleNotFoundError:
    Path(sys.argv[2]).write_text("null")
    sys.exit()


def describe(name, example):
    task = seqio.get_mixture_or_task(name)
    data = tf.data.Dataset.from_tensors({key: tf.constant(value) for key, value in example.items()})
    first = next(task.preprocessors[0](data).as_numpy_iterator())
    texts = {key: first[key].decode() for key in ("inputs", "targets") if key in first}
    answers = [task.postprocess_fn(texts["targets"], example=None, is_target=True), task.postprocess_fn("nothing")]
    return {
        "dataset": task.source.tfds_dataset.name.partition(":")[0],
        "texts": texts,
        "required": {key: feature.required for key, feature in task.output_features.items()},
        "postprocessed": answers,
        "metrics": len(task.metric_fns),
    }


jobs = json.loads(Path(sys.argv[1]).read_text())
Path(sys.argv[2]).write_text(json.dumps({name: describe(name, example) for name, example in jobs.items()}))
