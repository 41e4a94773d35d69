"""Registers `absent`: the task of the demo, with a data file that does not exist."""

import t5x.examples.demo.dates  # noqa: F401  registers `dates`
from t5x import data

data.TaskRegistry.add(
    "absent",
    data.JsonLinesDataSource({"train": "/no/such/file.jsonl"}),
    data.TaskRegistry.get("dates").output_features,
    [data.preprocessors.tokenize],
)
