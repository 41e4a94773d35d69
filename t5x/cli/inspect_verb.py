"""`t5x inspect`: prints what a checkpoint of any format contains."""

import argparse
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.cli.parser import VerbParser

if TYPE_CHECKING:
    import numpy as np

    from t5x.checkpoints.formats import LazyArray, Source

_CHUNK_BYTES = 2**24


def define(parser: VerbParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a MODEL_DIR")
    parser.add_argument("--json", action="store_true", help="print JSON, with a hash of all parameters")
    parser.set_help(
        "Print format, step, model and parameters of a checkpoint of any supported format.", "t5x inspect runs/demo"
    )


def run(args: argparse.Namespace) -> None:
    work_begins()
    inspect(args.path, as_json=args.json)


def inspect(path: str, *, as_json: bool = False) -> dict[str, Any]:
    """Print format, step, model and parameters of a checkpoint; return them as a JSON-compatible dictionary."""
    from t5x.checkpoints import families, layout, transfer, tree
    from t5x.checkpoints.formats import open_checkpoint

    source = open_checkpoint(path)
    params = canonical_params(source)
    config = source.config
    try:
        config = transfer.config_of(source)
        model = families.name_of(config, source.model_type)
    except UserError as error:
        model = f"unknown ({error})"
    report: dict[str, Any] = {
        "path": source.path,
        "format": source.format,
        "step": source.step,
        "model": model,
        "config": config,
        "num_params": sum(array.size for array in params.values()),
        "optimizer_state": any(name.startswith(layout.STATES) for name in source.arrays),
        "vocabularies": sorted(source.vocabulary_files),
        "parameters": {name: {"shape": list(a.shape), "dtype": a.dtype.name} for name, a in params.items()},
    }
    if as_json:
        report["params_sha256"] = params_sha256(params)
        print(json.dumps(report, indent=1))
        return report
    step = "none" if source.step is None else source.step
    state = "with" if report["optimizer_state"] else "without"
    vocabularies = ", ".join(report["vocabularies"]) or "none"
    print(f"{source.path}\nformat: {source.format}\nstep:   {step}\nmodel:  {model}")
    print(f"holds:  {report['num_params']:,} parameters, {state} optimizer state; vocabularies: {vocabularies}\n")
    print("\n".join(tree.parameter_table(tree.nest(dict(params)), {}, {})))
    return report


def canonical_params(source: "Source") -> dict[str, "LazyArray"]:
    """Return the parameters under T5X's unrolled names, `target/…`."""
    from t5x.checkpoints import layout, transfer

    return {n: a for n, a in transfer.canonical_arrays(source).items() if n.startswith(layout.PARAMS)}


def params_sha256(params: Mapping[str, "LazyArray"]) -> str:
    """Return a hash of all parameters by name, equal for every format, layout and dtype with the same values.

    It is the SHA-256 of one line per parameter, sorted: name, shape, and the SHA-256 of its values as float32. Arrays
    are read one by one in the given order, in which the layers of a stack are adjacent.
    """
    lines = [f"{name} {list(array.shape)} {_sha256(array.read())}\n" for name, array in params.items()]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _sha256(array: "np.ndarray") -> str:
    import numpy as np

    digest = hashlib.sha256()
    array = np.atleast_1d(array)
    rows = max(1, _CHUNK_BYTES // max(1, array[:1].size * 4))
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows], "<f4").data)
    return digest.hexdigest()
