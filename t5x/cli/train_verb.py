"""`t5x train`: its arguments and the call of its entry point."""

import argparse
import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.cli import file_options
from t5x.cli.file_options import FileTraining
from t5x.cli.options import add_gin, processes, run_gin
from t5x.cli.parser import VerbParser, passed_options

log = logging.getLogger(__name__)

_FROM_FILE = "--model google/flan-t5-small --data train.tsv --steps 1000 --model_dir runs/mine"
_FROM_GIN = "--gin_file=t5x/examples/demo/dates.gin --gin.MODEL_DIR=runs/dates"


def define(parser: VerbParser) -> None:
    file_options.add(parser, "data file (no gin, no Python)", FileTraining)
    add_gin(parser)
    parser.set_help(
        "Pretrain or fine-tune a model, configured by gin files or, for a data file, by options. A run that is started "
        "again with the same MODEL_DIR resumes.",
        f"""
        t5x train {_FROM_FILE} --inputs question --targets answer
        t5x train {_FROM_GIN} --gin.TRAIN_STEPS=500
        """,
    )


def trace_configured_run(train: Callable[..., Any]) -> None:
    """Create the parts of the configured run and trace it. A model whose files are missing or remote is not checked."""
    import gin

    from t5x import configuration
    from t5x.files.remote import offline
    from t5x.partitioning import PjitPartitioner
    from t5x.trainer.abstract_run import trace_run

    bindings = gin.get_bindings(configuration.configured(train), resolve_references=False)
    bindings = {name: value for name, value in bindings.items() if name in inspect.signature(trace_run).parameters}
    try:
        with offline():
            partitioner = copy.deepcopy(bindings.pop("partitioner"))  # copying creates what gin references name
    except UserError as error:
        log.warning("the run is traced for one device: %s", error)
        partitioner = PjitPartitioner(num_partitions=1)
    try:
        with offline():
            parts = copy.deepcopy(bindings)
    except (KeyError, OSError, UserError) as error:
        log.warning("the model is not checked: %s", error)
        return
    except TypeError as error:
        raise UserError(f"A part of the configured run cannot be created: {error}") from error
    trace_run(partitioner=partitioner, **parts)


def run(args: argparse.Namespace) -> None:
    passed = passed_options(args, FileTraining)
    if not passed:
        from t5x.runs.train import train

        run_gin(args, train, (_FROM_FILE, _FROM_GIN))
        if args.dry_run:
            trace_configured_run(train)
        return
    if "data" in passed and (args.gin_file or args.modules):
        refused = "--gin_file" if args.gin_file else "--import"
        raise UserError(f"--data cannot be combined with {refused}. Single gin values (--gin.NAME=VALUE) are possible.")
    options = file_options.parsed(args, FileTraining)
    from t5x.cli.file_training import train_file

    work_begins()
    train_file(
        options,
        bindings=args.gin_bindings,
        dry_run=args.dry_run,
        strict=args.strict,
        command=file_options.command("train", passed, args.gin_bindings),
        processes=processes(args),
    )
