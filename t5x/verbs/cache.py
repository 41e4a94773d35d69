"""`t5x cache`: its arguments and the call of its entry point."""

import argparse
import signal

from t5x.verbs.arguments import leave_in_order, work_begins


def define(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the tokenised examples of a task, or of all tasks of a mixture, once. Training finds them by itself, "
        "and its batches stay the same. Stopped and started again, it goes on."
    )
    parser.add_argument("name", metavar="TASK", help="a registered task or mixture")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="that registers it, or a .py",
    )
    parser.add_argument("--split", action="append", metavar="SPLIT", help="may be repeated (default: all it has)")
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="default: the first of T5X_TASK_CACHES, the directories, parted by ':', in which caches are looked for. "
        "Unset, that is `tasks` in T5X_CACHE_DIR or ~/.cache/t5x; empty, no cache is used",
    )
    parser.add_argument("--num_workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--overwrite", action="store_true", help="replace a cache that is there")
    parser.add_argument("--drop_text", action="store_true", help="without *_pretokenized: smaller, for training only")
    parser.add_argument("--skip_bad_examples", action="store_true", help="count examples that cannot be read")
    parser.add_argument("--runner", metavar="RUNNER", help="Apache Beam's, such as DirectRunner, instead of processes")
    parser.epilog = "example:\n  t5x cache --import my_tasks.py my_task --split train"


def run(args: argparse.Namespace) -> None:
    from t5x.cache import cache

    work_begins()
    signal.signal(signal.SIGTERM, leave_in_order)
    cache(
        args.name,
        modules=args.modules,
        splits=args.split,
        output_dir=args.output_dir,
        num_workers=args.num_workers,
        overwrite=args.overwrite,
        drop_text=args.drop_text,
        skip_bad_examples=args.skip_bad_examples,
        runner=args.runner,
    )
