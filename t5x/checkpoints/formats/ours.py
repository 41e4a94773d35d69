"""Our own checkpoints, as a source like any other."""

import json

import numpy as np
from etils import epath

from t5x.checkpoints import arrays, manifest, paths
from t5x.checkpoints.formats.base import LazyArray, Source

MODEL_FILE = "model.json"


def read_ours(path: epath.PathLike) -> Source:
    """Opens a checkpoint that this program wrote, and has verified."""
    path = paths.local_path(path)
    content = manifest.read(path)
    state = path / paths.STATE

    def lazy(name, struct):
        return LazyArray(struct.shape, np.dtype(struct.dtype), lambda: arrays.read(state, {name: struct})[name])

    vocabularies: dict[str, dict[str, bytes]] = {}
    for name in content.files:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "vocabulary":
            vocabularies.setdefault(parts[1], {})[parts[2]] = manifest.read_file(path, name)
    config = None
    if MODEL_FILE in content.files:
        config = json.loads(manifest.read_file(path, MODEL_FILE))["config"]
    return Source(
        format="t5x",
        path=str(path),
        step=content.step,
        arrays={name: lazy(name, struct) for name, struct in arrays.read_shapes(state).items()},
        config=config,
        vocabulary_files=vocabularies,
    )
