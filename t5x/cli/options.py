"""Code shared by the verbs: arguments, gin files, several processes."""

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.cli.parser import VerbParser, add_options, choice, flag, option

DTYPE = (("float32", "bfloat16"), "dtype of the activations (float32 on CPUs, else bfloat16)")


@dataclasses.dataclass(kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    vocabulary: str | None = option("FILE", "for a model without one: spiece.model, or bytes")
    dtype: str | None = choice(*DTYPE)


@dataclasses.dataclass(kw_only=True)
class OutputOptions:
    """Where a job writes its results."""

    output: str = option("FILE", "file for the results; - is standard output (default)", "-")
    overwrite: bool = flag("replace an existing output, and chunks of another run")


@dataclasses.dataclass(kw_only=True)
class BatchOptions:
    """How much a job computes and saves at once."""

    batch_size: int = option("N", "inputs per batch (32)", 32)
    checkpoint_period: int = option("N", "save results every N batches (16)", 16)


@dataclasses.dataclass(kw_only=True)
class ShardOptions:
    """Which part of the input a job processes."""

    num_shards: int = option("N", "number of shards (1)", 1)
    shard_id: int = option("I", "index of this shard, from 0", 0, type=int)


def add_shards(parser: VerbParser) -> None:
    """Add the options of `ShardOptions` on a page of their own."""
    title = "shards: parts of the input, each processed by a separate command"
    add_options(parser.add_topic("shards", title), ShardOptions)


def add_gin(parser: VerbParser) -> None:
    """Add the options of runs with gin files, and those of several processes."""
    gin = add_gin_files(parser)
    add_flag(gin, "dry_run", "print the configuration and run nothing")
    gin.add_argument("--strict", action="store_true", help="treat warnings about the configuration as errors")
    add_processes(parser)
    _add_logging(parser)


def add_gin_files(parser: VerbParser) -> Any:
    """Add the options of `parse_gin`, and return their group."""
    gin = parser.add_topic("gin", "gin files", _GIN)
    gin.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="may be repeated; the last wins")
    gin.add_argument("--gin_bindings", action="append", default=[], metavar="'N = VALUE'", help="a gin statement")
    gin.add_argument("--gin_search_paths", default=".", metavar="A,B", help="directories of gin files (.)")
    gin.add_argument("--tfds_data_dir", metavar="DIR", help="directory of TensorFlow Datasets")
    gin.add_argument("--seqio_additional_cache_dirs", default="", metavar="A,B", help="task caches of the real seqio")
    add_import(gin)
    return gin


_GIN = """\
--gin.NAME=VALUE sets a macro or a parameter after all files: --gin.TRAIN_STEPS=1000,
--gin.train/utils.DatasetConfig.batch_size=64. A value that is not gin is a string. A gin file
is searched in the search paths, next to the file that includes it, and beside the t5x package."""


def add_flag(group: Any, name: str, help_: str) -> None:
    """Add a flag as absl, which T5X uses, understands it: `--name`, `--noname`, `--name=false` (see `VerbParser`)."""
    group.add_argument(f"--{name}", action="store_true", help=help_)
    group.add_argument(f"--no{name}", dest=name, action="store_false", help=argparse.SUPPRESS)


_LEVELS = "debug, info, warning, error or fatal; or absl's 1, 0, -1, -2 or -3"


def _logging_level(text: str) -> int:
    names = dict(zip(("1", "0", "-1", "-2", "-3"), ("debug", "info", "warning", "error", "fatal"), strict=True))
    level = logging.getLevelNamesMapping().get(names.get(text, text).upper())
    if level is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a level: {_LEVELS}")
    return level


def _add_logging(parser: VerbParser) -> None:
    group = parser.add_topic(
        "logging", "logging", "Messages go to standard error, so most flags of T5X's programs change nothing."
    )
    group.add_argument("-v", "--verbosity", type=_logging_level, metavar="LEVEL", help=_LEVELS)
    for name in ("alsologtostderr", "logtostderr", "showprefixforinfo"):
        add_flag(group, name, "ignored")
    for name in ("log_dir", "stderrthreshold", "logger_levels"):
        group.add_argument(f"--{name}", metavar="X", help="ignored")


def add_processes(parser: VerbParser) -> None:
    group = parser.add_topic(
        "processes", "several processes, one command each", "SLURM, Open MPI, Kubernetes and TPU pods are detected."
    )
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--process_count", type=int, metavar="N", help="number of processes")
    group.add_argument("--process_index", type=int, metavar="I", help="index of this process, from 0")
    group.add_argument(
        "--initialization_timeout", type=int, default=300, metavar="N", help="seconds to wait for the others (300)"
    )
    add_flag(group, "multiprocess_gpu", "fail unless there are several processes")


@contextlib.contextmanager
def processes(args: argparse.Namespace) -> Iterator[None]:
    """Connect the processes of a run, if there are several, while the context is active."""
    from t5x.partitioning import consistency, multiprocess

    names = ("coordinator_address", "process_count", "process_index", "initialization_timeout", "multiprocess_gpu")
    multiprocess.enable_compilation_cache()
    multiprocess.keep_stdout_clean()
    with multiprocess.run(**{name: getattr(args, name) for name in names}):
        consistency.require_same("configuration", lambda: consistency.describe_command(args))
        yield


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options that the user passed."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def refuse_gin(args: argparse.Namespace) -> None:
    """Raise a UserError if options of gin files are passed with --model."""
    names = ("gin_file", "gin_bindings", "dry_run", "tfds_data_dir", "seqio_additional_cache_dirs")
    if unused := [name for name in names if getattr(args, name)]:
        raise UserError(
            f"{flags(unused).replace('--gin_bindings', '--gin.…')} cannot be used with --model, which uses the "
            "configuration in the checkpoint. Remove them, or name the checkpoint with --gin.CHECKPOINT_PATH instead."
        )


def add_import(parser: Any) -> None:
    help_ = "module or .py file that registers tasks; may be repeated"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=help_)


def import_modules(args: argparse.Namespace) -> None:
    if args.modules:
        from t5x.data.dataset_config import import_task_module

        for module in args.modules:
            import_task_module(module)


def parse_gin(args: argparse.Namespace, entries: Sequence[Callable]) -> None:
    """Parse the gin files and bindings of a command.

    Args:
      entries: functions that `import __main__` offers.
    """
    from t5x import configuration

    if args.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = args.tfds_data_dir
    if args.seqio_additional_cache_dirs:
        from t5x.data import seqio_bridge

        seqio_bridge.add_cache_directories(filter(None, args.seqio_additional_cache_dirs.split(",")))
    import_modules(args)
    configuration.parse(
        gin_files=args.gin_file,
        bindings=args.gin_bindings,
        search_paths=[path for path in args.gin_search_paths.split(",") if path],
        entry_points={entry.__name__: entry for entry in entries},
    )


def run_gin(args: argparse.Namespace, entry: Callable, examples: Sequence[str], others: Sequence[Callable] = ()) -> Any:
    """Parse and check the configuration, call the entry point and return its result.

    Args:
      examples: options of runs without gin files and with them, for a message.
      others: further entry points that the gin files may configure.
    """
    from t5x import configuration

    if not args.gin_file and not args.gin_bindings:
        ways = "".join(f"\n  t5x {args.verb} {options}" for options in examples)
        raise UserError(f"`t5x {args.verb}` needs options or gin files:{ways}")
    parse_gin(args, [entry, *others])
    configuration.check(entry, strict=args.strict)
    if args.dry_run:
        print(configuration.resolved_str())
        return None
    work_begins()
    with processes(args):
        return configuration.configured(entry)()


@contextlib.contextmanager
def job_process(args: argparse.Namespace) -> Iterator[None]:
    """Connect the processes of a job; SIGTERM and Ctrl-C end it in order."""
    import_modules(args)  # they may define classes, such as a vocabulary
    work_begins()
    with processes(args):
        yield
