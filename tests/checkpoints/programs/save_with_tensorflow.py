"""Writes checkpoints with TensorFlow, which the test process itself does not import.

    python save_with_tensorflow.py DIRECTORY

DIRECTORY/values.npz holds raw bytes by name. DIRECTORY/job.json: "variables", {name: [shape, type]}, and
"checkpoints", {prefix: [names of the variables of each data file]}; a name may come with TensorFlow's description of
the slice that it is, [name, description].
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

directory = Path(sys.argv[1])
job = json.loads((directory / "job.json").read_text())
with np.load(directory / "values.npz") as values:
    tensors = {
        name: tf.constant(values[name].view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))
        for name, (shape, dtype) in job["variables"].items()
    }
for prefix, files in job["checkpoints"].items():
    parts = []
    (directory / f"{prefix}_parts").mkdir(parents=True)
    for number, names in enumerate(files):
        names = [name if isinstance(name, list) else [name, ""] for name in names]
        parts.append(str(directory / f"{prefix}_parts" / str(number)))
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=[name for name, _ in names],
            shape_and_slices=[description for _, description in names],
            tensors=[tensors[name] for name, _ in names],
        )
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(directory / prefix))
