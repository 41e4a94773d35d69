"""Code shared by the verbs that run jobs from files: `infer --model`, `eval --model`, `rerank` and `answer`."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from t5x.verbs.arguments import import_modules, processes
from t5x.verbs.interrupts import work_begins
from t5x.verbs.verb_parser import VerbParser

JOB_OPTIONS, SHARD_OPTIONS = ("output", "overwrite", "batch_size", "checkpoint_period"), ("num_shards", "shard_id")


def add_output(group: Any, content: str) -> None:
    group.add_argument("--output", metavar="FILE", help=f"{content}; - is standard output (default)")
    group.add_argument(
        "--overwrite", action="store_true", default=None, help="replace an existing output, and chunks of another run"
    )


def add_batches(group: Any, unit: str, checkpoint_period: int) -> None:
    group.add_argument("--batch_size", type=int, metavar="N", help=f"{unit} per batch (32)")
    group.add_argument(
        "--checkpoint_period", type=int, metavar="N", help=f"save results every N batches ({checkpoint_period})"
    )


def add_shards(parser: VerbParser) -> None:
    shards = parser.add_topic("shards", "shards: parts of the input, each processed by a separate command")
    shards.add_argument("--num_shards", type=int, metavar="N", help="number of shards (1)")
    shards.add_argument("--shard_id", type=int, metavar="I", help="index of this shard, from 0")


@contextlib.contextmanager
def job_process(args: argparse.Namespace) -> Iterator[None]:
    """Connect the processes of a job; SIGTERM and Ctrl-C end it in order."""
    import_modules(args)  # they may define classes, such as a vocabulary
    work_begins()
    with processes(args):
        yield
