"""`t5x cache`: write the caches of tasks."""

import argparse
import logging
from collections.abc import Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.cli.options import add_import, import_modules
from t5x.cli.parser import VerbParser
from t5x.files import user_files

logger = logging.getLogger(__name__)


def define(parser: VerbParser) -> None:
    parser.add_argument("name", metavar="TASK", help="a registered task or mixture")
    add_import(parser)
    parser.add_argument(
        "--split", dest="splits", action="append", metavar="SPLIT", help="may be repeated (default: all splits)"
    )
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="local or remote; default: the first directory in T5X_TASK_CACHES, a list separated by ':' that is "
        "searched for caches. If unset, it is `tasks` in T5X_CACHE_DIR or ~/.cache/t5x; if empty, no cache is used",
    )
    parser.add_argument("--num_workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing cache")
    parser.add_argument("--drop_text", action="store_true", help="omit *_pretokenized: smaller, for training only")
    parser.add_argument("--skip_bad_examples", action="store_true", help="skip and count examples that cannot be read")
    parser.add_argument("--runner", metavar="RUNNER", help="Apache Beam runner, such as DirectRunner (default: none)")
    parser.set_help(
        "Tokenize the examples of a task, or of all tasks of a mixture, once. Training finds the cache by itself, and "
        "its batches stay the same. If interrupted, run the same command again: it resumes.",
        "t5x cache dates --import t5x.examples.demo.dates --split test",
    )


_OPTIONS = ("splits", "output_dir", "num_workers", "overwrite", "drop_text", "skip_bad_examples", "runner")


def run(args: argparse.Namespace) -> None:
    work_begins()
    import_modules(args)
    cache_tasks(args.name, **{name: getattr(args, name) for name in _OPTIONS})


def cache_tasks(
    name: str, *, splits: Sequence[str] | None = None, output_dir: str | None = None, **options: Any
) -> None:
    """Cache a task, or all tasks of a mixture, and print a table of the splits.

    Args:
      splits: None caches all splits of each task.
      output_dir: directory of the caches; None is where they are looked up.
      options: arguments of `cache_writer.write`.
    """
    from t5x.cli.text_page import TextPage
    from t5x.data import cache_writer
    from t5x.data.tasks import check_split, get_mixture_or_task, get_subtasks

    task_or_mixture = get_mixture_or_task(name)
    for split in splits or ():
        check_split(task_or_mixture, split)
    tasks = get_subtasks(task_or_mixture)
    reasons = {task.name: task.why_not_cached() for task in tasks}
    if len(refused := [reason for reason in reasons.values() if reason]) == len(reasons):
        raise UserError("\n".join(refused))
    if output_dir is not None:
        output_dir = user_files.absolute_path(output_dir)
    rows = []
    for task in tasks:
        if reasons[task.name]:
            logger.info("%s", reasons[task.name])
            continue
        for split in task.splits:
            if splits and split not in splits:
                continue
            cache = cache_writer.write(task, split, directory=output_dir, **options)
            logger.info("%s is complete: %d of %d shard(s) written now", cache.path, cache.written, cache.shards)
            if cache.bad:
                logger.warning("skipped %d bad example(s) of task %s, split %s", cache.bad, task.name, split)
            numbers = (f"{cache.examples:,}", f"{cache.tokens:,}", f"{cache.bytes:,}", f"{cache.seconds:.1f}")
            rows.append((f"{task.name} {split}", *numbers))
    TextPage(width=200).table(("task split", "examples", "tokens", "bytes", "seconds"), rows)
    if output_dir is not None:
        logger.info("To use it, set T5X_TASK_CACHES=%s", output_dir)
