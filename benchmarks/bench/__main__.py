"""Parse the arguments of `python -m benchmarks.bench`, run one measurement and print its result."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from t5x._runtime import startup
from t5x._runtime.errors import UserError, check_at_least
from t5x._runtime.signals import work_begins
from t5x.cli.options import add_import, import_modules
from t5x.cli.parser import VerbParser

_PROGRAM = "python -m benchmarks.bench"
_SIZES = ("tiny", "small", "base", "large", "xl", "xxl")  # as in `benchmarks.bench.workload`, which imports JAX
_MODEL = ("size", "batch", "attention", "dtype", "scan", "steps")
_OPTIONS = {
    "train": (*_MODEL, "inputs", "targets", "dropout", "packed", "matmul", "remat", "microbatches"),
    "generate": (*_MODEL, "inputs", "targets", "beams"),
    "score": (*_MODEL, "inputs"),
    "encode": (*_MODEL, "inputs"),
    "data": ("batch", "inputs", "targets", "packed", "steps", "task", "data", "vocabulary", "split", "workers"),
    "checkpoint": (*_MODEL, "inputs", "targets", "directory"),
}
# Rows that keep an accelerator busy, or that a CPU computes in reasonable time.
_ROWS = {
    "train": {"small": 256, "base": 128, "large": 64, "xl": 16},
    "generate": {"small": 64, "base": 64, "large": 64, "xl": 32, "xxl": 16},
    "score": {"small": 256, "base": 128, "large": 64, "xl": 32, "xxl": 16},
    "encode": {"small": 256, "base": 128, "large": 64, "xl": 32, "xxl": 16},
}
_CPU_ROWS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run a measurement, and return the exit code: 0, or 2 for errors that the user can fix."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    startup.configure_logging(debug=debug)
    try:
        run(_parser().parse_args(startup.set_jax_flags(words)))
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        os._exit(130)  # XLA may still compile in a thread that signals do not stop
    return 0


def _parser() -> VerbParser:
    parser = VerbParser("bench")
    parser.prog, parser.usage = _PROGRAM, f"{_PROGRAM} WORK [options]"
    parser.add_argument("work", choices=_OPTIONS, metavar="WORK", help=", ".join(_OPTIONS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--batch", type=int, metavar="N", help="rows per step")
    parser.add_argument("--inputs", type=int, metavar="N", help="input tokens per row (512; checkpoint on CPUs: 64)")
    parser.add_argument("--targets", type=int, metavar="N", help="target tokens per row (128; checkpoint on CPUs: 64)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps to measure (about ten seconds; checkpoint: 3 saves)"
    )
    parser.add_argument(
        "--packed", type=int, nargs="?", const=4, metavar="N", help="examples in a row (4; train, and data as they fit)"
    )
    model = parser.add_argument_group("the model")
    model.add_argument("--size", choices=_SIZES, help="model size (small); tiny is for a quick test")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on CPUs, else bfloat16")
    model.add_argument("--matmul", choices=("fp8",), help="dtype of the layers' matmuls (that of --dtype; train)")
    model.add_argument("--remat", choices=("minimal", "full"), help="recompute in the backward pass (nothing; train)")
    model.add_argument("--microbatches", type=int, metavar="N", help="microbatches of a step (1; train)")
    model.add_argument("--attention", metavar="NAME", help="attention backend (auto)")
    model.add_argument("--scan", action="store_true", default=None, help="scan over stacked layers")
    model.add_argument("--dropout", type=float, metavar="X", help="rate (0; train)")
    model.add_argument("--beams", type=int, metavar="N", help="1 is greedy (1; generate)")
    data = parser.add_topic("data", "data (default: synthetic)")
    data.add_argument("--data", metavar="FILE", help="file with fields inputs and targets; needs --vocabulary")
    data.add_argument("--vocabulary", metavar="FILE", help="a SentencePiece model, a tokenizer.json, or bytes")
    data.add_argument("--task", metavar="NAME", help="a registered task or mixture")
    data.add_argument("--split", metavar="NAME", help="split of the task or file (train)")
    data.add_argument("--workers", type=int, metavar="N", help="worker processes (default: by the number of cores)")
    add_import(data)
    parser.add_argument_group("checkpoint").add_argument(
        "--directory", metavar="DIR", help="directory on the disk to measure (the temporary directory)"
    )
    parser.set_help(
        "Measure the code paths of t5x on this machine: T5 1.1 shapes, random weights and tokens, no padding.",
        _EXAMPLES,
    )
    return parser


_EXAMPLES = """
python -m benchmarks.bench train --size tiny --batch 4 --steps 3
python -m benchmarks.bench generate --size base --batch 64 --beams 4 --json
python -m benchmarks.bench data --data train.jsonl --vocabulary spiece.model --packed
python -m benchmarks.bench checkpoint --size large --directory /mnt/disk
"""


def run(args: argparse.Namespace) -> None:
    passed = {name: value for name, value in vars(args).items() if value is not None}
    _check(args.work, passed)
    options = {name: passed[name] for name in _OPTIONS[args.work] if name in passed}
    import_modules(args)
    from t5x.partitioning.multiprocess import enable_compilation_cache

    enable_compilation_cache()
    work_begins()
    from benchmarks.bench import report

    result = {"work": args.work} | _measure(args.work, options)
    print(json.dumps(report.rounded(result)) if args.json else report.table(result), flush=True)


def _check(work: str, passed: dict[str, Any]) -> None:
    for name in dict.fromkeys(name for names in _OPTIONS.values() for name in names):
        if name in passed and name not in _OPTIONS[work]:
            others = ", ".join(f"`{other}`" for other in _OPTIONS if name in _OPTIONS[other])
            raise UserError(f"--{name} is an option of {others}, not of `{work}`.")
    if work != "data" and passed["modules"]:
        raise UserError("--import is an option of `data`.")
    for least, names in ((1, ("batch", "steps", "beams", "microbatches")), (2, ("inputs", "targets"))):
        check_at_least(least, "--", **{name: passed.get(name) for name in names})


def _measure(work: str, options: dict[str, Any]) -> dict[str, Any]:
    if work == "data":
        from benchmarks.bench import data

        return data.measure(**options | {"packed": bool(options.get("packed"))})
    import jax

    from benchmarks.bench import checkpoint, compute
    from benchmarks.bench.workload import Workload
    from t5x.network import default_dtype

    own = {name: options.pop(name) for name in ("steps", "beams", "directory") if name in options}
    options.setdefault("size", "small")
    options.setdefault("dtype", default_dtype())
    on_cpu, devices = jax.default_backend() == "cpu", jax.device_count()
    rows = _CPU_ROWS if on_cpu else _ROWS.get(work, {}).get(options["size"], _CPU_ROWS)
    options.setdefault("batch", -(-rows // devices) * devices)
    if work == "checkpoint" and on_cpu:
        options = {"inputs": 64, "targets": 64} | options
    workload = Workload(**options)
    print(f"{work}: T5 1.1 {workload.size}, batch {workload.batch}, {workload.dtype} …", file=sys.stderr, flush=True)
    if work == "checkpoint":
        return checkpoint.measure(workload, rounds=own.pop("steps", 3), **own)
    return getattr(compute, work)(workload, **own)


if __name__ == "__main__":
    sys.exit(main())
