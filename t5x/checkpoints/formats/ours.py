"""Our own checkpoints, as a source like any other."""

import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from t5x.checkpoints import manifest, paths
from t5x.checkpoints.arrays import EMPTY
from t5x.checkpoints.formats.base import LazyArray, Source
from t5x.checkpoints.formats.native_read import check_step
from t5x.checkpoints.formats.orbax import METADATA, read_orbax
from t5x.ranking.templates import from_fields

MODEL_FILE = "model.json"


def read_ours(path: epath.PathLike) -> Source:
    """Opens a checkpoint that this program wrote, and has verified."""
    path = paths.local_path(path)
    content = manifest.read(path)
    vocabularies: dict[str, dict[str, bytes]] = {}
    for name in content.files:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "vocabulary":
            vocabularies.setdefault(parts[1], {})[parts[2]] = manifest.read_file(path, name)
    description = _description(path) if MODEL_FILE in content.files else {}
    return Source(
        format="t5x",
        path=str(path),
        step=check_step(path, content.step),
        arrays={**read_orbax(path).arrays, **_empty_arrays(path / paths.STATE)},
        config=description.get("config"),
        vocabulary_files=vocabularies,
        inputs_bidirectional_attention=bool(description.get("inputs_bidirectional_attention")),
        template=from_fields(template, f"{path}/{MODEL_FILE}") if (template := description.get("template")) else None,
    )


def _empty_arrays(state: epath.Path) -> dict[str, LazyArray]:
    """Those without elements, which are in the metadata alone."""
    custom = json.loads((state / METADATA).read_bytes()).get("custom_metadata") or {}
    empty = {n: (tuple(leaf["shape"]), jnp.dtype(leaf["dtype"])) for n, leaf in custom.get(EMPTY, {}).items()}
    return {
        name: LazyArray(shape, dtype, functools.partial(np.zeros, shape, dtype))
        for name, (shape, dtype) in empty.items()
    }


def _description(path: epath.Path) -> dict[str, Any]:
    try:
        description = json.loads(manifest.read_file(path, MODEL_FILE))
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict) or not isinstance(description.get("config"), dict):
        raise manifest.DamagedCheckpoint(path, f"{MODEL_FILE} does not describe a network")
    return description
