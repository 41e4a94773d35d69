"""StableHLO: programs of `jax.export` with the weights beside them, which need only jax and safetensors to run.

DEST/description.json      programs, their inputs and outputs, decoding, lengths
     predict.stablehlo     and score, rank, encode: `jax.export.deserialize` reads them
     weights.safetensors   the first argument of every program
     vocabulary/           the files of the vocabulary
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from t5x._runtime.imports import import_extra
from t5x.apps.exporting import checking
from t5x.apps.exporting.programs import Exportable

DESCRIPTION, WEIGHTS = "description.json", "weights.safetensors"


def write(directory: str, exportable: Exportable, platforms: Sequence[str]) -> str:
    """Write the programs and weights, run them, and return a line about the differences.

    Args:
      directory: an empty directory.
      platforms: where the programs can run.
    """
    from safetensors.flax import save_file

    import_extra("flatbuffers", "StableHLO exports need flatbuffers: `pip install flatbuffers`")
    programs = {}
    for name, program in exportable.programs().items():
        exported = exportable.export(program, platforms)
        with open(os.path.join(directory, f"{name}.stablehlo"), "wb") as file:
            file.write(exported.serialize())
        of_inputs = exported.in_avals[-len(program.inputs) :]  # after the weights
        programs[name] = {
            "file": f"{name}.stablehlo",
            "inputs": _shapes(dict(zip(program.inputs, of_inputs, strict=True))),
            "outputs": _shapes(jax.tree.unflatten(exported.out_tree, exported.out_avals)),
        }
    weights = os.path.join(directory, WEIGHTS)
    save_file({name: jnp.asarray(x) for name, x in exportable.arrays.items()}, weights)
    os.chmod(weights, os.stat(file.name).st_mode)  # safetensors makes it readable for the user only
    vocabulary, model = _write_vocabulary(directory, exportable), exportable.loaded.model
    description = {
        "format": "t5x-stablehlo",
        "platforms": list(platforms),
        "weights": WEIGHTS,
        "programs": programs,
        "vocabulary": vocabulary,
        "pad_id": model.pad_id,
        "eos_id": model.eos_ids[0] if len(model.eos_ids) == 1 else list(model.eos_ids),
        "decoding": dataclasses.asdict(exportable.decoding),
    }
    with open(os.path.join(directory, DESCRIPTION), "w") as text_file:
        json.dump(description, text_file, indent=1)
        text_file.write("\n")
    return checking.compare_ids(exportable, StableHLOReader(directory))


def _shapes(avals: dict[str, Any]) -> dict[str, Any]:
    """Return {name: {shape, dtype}}; dimensions that vary are strings."""

    def size(n: Any) -> int | str:
        return str(n) if export.is_symbolic_dim(n) else n

    return {name: {"shape": [size(n) for n in x.shape], "dtype": x.dtype.name} for name, x in avals.items()}


def _write_vocabulary(directory: str, exportable: Exportable) -> dict[str, list[str]]:
    """Write the vocabulary files, and return their paths by feature."""
    written = {}
    for feature, files in exportable.loaded.source.vocabulary_files.items():
        os.makedirs(os.path.join(directory, "vocabulary", feature))
        for name, content in files.items():
            with open(os.path.join(directory, "vocabulary", feature, name), "wb") as file:
                file.write(content)
        written[feature] = [f"vocabulary/{feature}/{name}" for name in files]
    return written


class StableHLOReader:
    """Runs the programs of an export, from its files alone."""

    def __init__(self, directory: str):
        from safetensors.flax import load_file

        self._directory = directory
        self._weights = load_file(os.path.join(directory, WEIGHTS))
        self._programs: dict[str, export.Exported] = {}

    def __call__(self, name: str, *ids: np.ndarray) -> dict[str, np.ndarray]:
        if name not in self._programs:
            with open(os.path.join(self._directory, f"{name}.stablehlo"), "rb") as file:
                self._programs[name] = export.deserialize(bytearray(file.read()))
        return jax.device_get(self._programs[name].call(self._weights, *ids))
