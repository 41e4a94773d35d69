"""Tasks of well-known data sets, from the files that they are published as."""

import functools
import os

from t5x import metrics
from t5x.data import Feature, Task, TaskRegistry, Vocabulary
from t5x.data.preprocessors import append_eos_after_trim, glue, tokenize
from t5x.data.sources import TsvDataSource


def sst2(directory: str, vocabulary: Vocabulary) -> Task:
    """SST-2, sentences with their sentiment: `train.tsv`, `dev.tsv` and `test.tsv` with a label and a sentence a line.

    The splits are `train`, `validation` and `test`; the targets `negative` and `positive`.
    """
    told = {"directory": directory, "vocabulary": vocabulary}
    if "sst2" in TaskRegistry.names() and (known := TaskRegistry.get("sst2")).source_info == told:
        return known
    files = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
    return TaskRegistry.add(
        "sst2",
        TsvDataSource({split: os.path.join(directory, name) for split, name in files.items()}, ("label", "sentence")),
        {"inputs": Feature(vocabulary), "targets": Feature(vocabulary)},
        preprocessors=[
            functools.partial(_with_number, field="label"),
            functools.partial(glue, benchmark_name="sst2", label_names=("negative", "positive"), id_key=None),
            tokenize,
            append_eos_after_trim,
        ],
        metric_fns=[metrics.accuracy],
        source_info=told,
    )


def _with_number(example: dict[str, str], field: str) -> dict[str, str | int]:
    return example | {field: int(example[field])}
