"""`t5x inspect`: what a checkpoint is, whatever its format."""

import hashlib
import json
from typing import Any

import numpy as np

from t5x.checkpoints import families, layout, transfer, tree
from t5x.checkpoints.formats import LazyArray, Source, open_checkpoint
from t5x.errors import UserError


def inspect(path: str, *, as_json: bool = False) -> dict[str, Any]:
    """Prints format, step, model and parameters of a checkpoint; returns what was printed as JSON."""
    source = open_checkpoint(path)
    params = canonical_params(source)
    config = source.config
    try:
        config = transfer.config_of(source)
        model = families.name_of(config)
    except UserError as error:
        model = f"unknown ({error})"
    total = sum(array.size for array in params.values())
    states = [name for name in source.arrays if name.startswith(layout.STATES)]
    report = {
        "path": source.path,
        "format": source.format,
        "step": source.step,
        "model": model,
        "config": config,
        "num_params": total,
        "optimizer_state": bool(states),
        "vocabularies": sorted(source.vocabulary_files),
        "parameters": {name: {"shape": list(a.shape), "dtype": a.dtype.name} for name, a in params.items()},
    }
    if as_json:
        report["params_sha256"] = params_sha256(params)
        print(json.dumps(report, indent=1))
        return report
    step = "none" if source.step is None else source.step
    print(f"{source.path}\nformat: {source.format}\nstep:   {step}\nmodel:  {model}")
    kept = ", with optimizer state" if states else ", without optimizer state"
    vocabularies = ", ".join(sorted(source.vocabulary_files)) or "none"
    print(f"holds:  {total:,} parameters{kept}; vocabularies: {vocabularies}\n")
    print("\n".join(tree.parameter_table(tree.nest(dict(params)), {}, {})))
    return report


def canonical_params(source: Source) -> dict[str, LazyArray]:
    """The parameters under T5X's unrolled names, `target/…`."""
    return {n: a for n, a in transfer.canonical_arrays(source).items() if n.startswith(layout.PARAMS)}


def params_sha256(params: dict[str, LazyArray]) -> str:
    """A hash of all parameters by name; the same for every format, layout and dtype that holds the same numbers."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = np.ascontiguousarray(params[name].read().astype(np.float32))
        digest.update(f"{name} {list(array.shape)}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
