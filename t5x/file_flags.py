"""The options of `t5x train --data` and `t5x data`: a plain file instead of gin files and a task in Python.

Imports only what argparse needs, so that `--help` is fast.
"""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from t5x.errors import UserError

DTYPE = {"choices": ("float32", "bfloat16"), "help": "of the activations (float32 on CPUs, else bfloat16)"}

# Each is an attribute of `t5x.plain.PlainRun`, which defines the defaults.
_FILE = {
    "data": {"metavar": "FILE", "help": ".jsonl, .tsv, .csv (names in the first line) or .parquet, also .gz"},
    "inputs": {"metavar": "FIELD", "help": "the field with the inputs (inputs)"},
    "targets": {"metavar": "FIELD", "help": "the field with the targets (targets)"},
    "prefix": {"metavar": "TEXT", "help": "put before every input, as it is"},
    "vocabulary": {
        "metavar": "FILE",
        "help": "a SentencePiece model (*.model), a tokenizer.json, or bytes; a checkpoint may bring its own",
    },
}
_TRAIN = {
    "valid": {"metavar": "FILE", "help": "of the same kind, held out: the loss and the metric on it are shown"},
    "model": {"metavar": "CHECKPOINT", "help": "fine-tune it; any that `t5x inspect` knows"},
    "size": {"metavar": "SIZE", "help": "or train from scratch: small, base, large, xl, xxl"},
    "family": {"metavar": "FAMILY", "help": "of --size: t5_1_1 (default), t5_1_0, mt5, byt5"},
    "model_dir": {"metavar": "DIR", "help": "for all that the run writes; the same one goes on"},
    "steps": {"type": int, "metavar": "N", "help": "to train, counted from the start of this run"},
    "batch_size": {"type": int, "metavar": "N", "help": "examples a step (32)"},
    "max_input_length": {"type": int, "metavar": "N", "help": "longer inputs are cut (512 tokens)"},
    "max_target_length": {"type": int, "metavar": "N", "help": "longer targets are cut (128 tokens)"},
    "learning_rate": {"type": float, "metavar": "X", "help": "constant (0.001; from scratch 0.01)"},
    "eval_every": {"type": int, "metavar": "N", "help": "steps between evaluations (1000), and at the end"},
    "save_every": {"type": int, "metavar": "N", "help": "steps between checkpoints (1000); the newest 3 stay"},
    "metric": {"metavar": "NAME", "help": "exact_match (default), accuracy, … of t5x.metrics, or none"},
    "seed": {"type": int, "metavar": "N", "help": "of initial values, order and dropout (0)"},
    "dtype": DTYPE,
    "skip_bad_examples": {"action": "store_true", "help": "pass over lines that cannot be read"},
}


def add_file(parser: argparse.ArgumentParser, title: str) -> None:
    """Add the options that describe a plain file."""
    _add(parser.add_argument_group(title), _FILE)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of `t5x train --data`."""
    _add(parser.add_argument_group("for a plain file, without gin or Python"), _FILE | _TRAIN)


def _add(group: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
    for name, settings in options.items():
        group.add_argument(f"--{name}", default=None, **settings)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options above that were given."""
    found = {name: getattr(args, name, None) for name in _FILE | _TRAIN}
    return {name: value for name, value in found.items() if value is not None}


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `t5x train --data`. Raise a UserError if they are incomplete or mixed with gin files."""
    options = given(args)
    if "data" not in options:
        raise UserError(f"{_flags(options)} goes with --data; a run by gin files has gin parameters for it.")
    if args.gin_file or args.modules:
        other = "--gin_file" if args.gin_file else "--import"
        raise UserError(
            f"--data and {other} exclude each other: a run is described by options or by gin files. (--gin.NAME=VALUE "
            "can be added to either.)"
        )
    if missing := [name for name in ("model_dir", "steps") if name not in options]:
        raise UserError(f"--data needs {_flags(missing)} too: --model_dir runs/my_run --steps 1000, for example.")
    return options


def command(args: argparse.Namespace) -> str:
    """Return the command line, quoted for a shell."""
    words = []
    for name, value in given(args).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(["t5x", "train", *words, *(f"--gin_bindings={binding}" for binding in args.gin_bindings)])


def _flags(names: Any) -> str:
    return ", ".join(f"--{name}" for name in names)
