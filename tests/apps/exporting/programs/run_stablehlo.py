"""Runs programs of a StableHLO export with jax alone: `run_stablehlo.py DIR`; see run_saved_model.py."""

import json
import sys

for name in ["t5x", "flax", *(name for name in sys.modules if name.startswith("flax."))]:
    sys.modules[name] = None

import numpy as np  # noqa: E402
from jax import export  # noqa: E402
from safetensors.flax import load_file  # noqa: E402

directory = sys.argv[1]
with open(f"{directory}/description.json") as file:
    description = json.load(file)
weights = load_file(f"{directory}/{description['weights']}")
programs = {}
for line in sys.stdin:
    name, inputs = json.loads(line)
    if name not in programs:
        with open(f"{directory}/{description['programs'][name]['file']}", "rb") as file:
            programs[name] = export.deserialize(bytearray(file.read()))
    ids = [np.array(inputs[key], np.int32) for key in description["programs"][name]["inputs"]]
    found = programs[name].call(weights, *ids)
    print(json.dumps({key: np.asarray(x, np.float64).tolist() for key, x in found.items()}), flush=True)
