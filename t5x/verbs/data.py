"""`t5x data`: its arguments and the call of its entry point."""

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING

from t5x.errors import UserError
from t5x.verbs import file_options
from t5x.verbs.arguments import add_import, import_modules, work_begins

if TYPE_CHECKING:
    from t5x.data.tasks import Task


def define(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the examples of a task, a mixture or a data file: the result of each preprocessor, tokens, a row of a "
        "batch, lengths, padding and truncation."
    )
    parser.add_argument("name", metavar="TASK", nargs="?", help="a registered task or mixture, unless --data is given")
    add_import(parser)
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="examples to show (5)")
    parser.add_argument("--lengths", metavar="L", help="feature lengths of training: inputs=512,targets=114")
    parser.add_argument("--pack", action="store_true", help="show a packed row")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order and of preprocessors (0)")
    file_options.add(parser, "data file (without a task)")
    parser.epilog = (
        "examples:\n  t5x data my_task --import my_tasks.py --lengths inputs=512,targets=64 --pack\n"
        "  t5x data --data train.jsonl --inputs question --targets answer --vocabulary spiece.model"
    )


def run(args: argparse.Namespace) -> None:
    from t5x.data.tasks import get_mixture_or_task
    from t5x.verbs.data_report import DataReport
    from t5x.verbs.text_page import Page

    options = file_options.given(args, file_options.FileOptions)
    if (args.name is None) == ("data" not in options):
        raise UserError(
            "Pass a task, `t5x data my_task --import my_tasks.py`, or a file, `t5x data --data train.jsonl`."
        )
    if args.name and options:
        raise UserError(f"{', '.join(f'--{name}' for name in options)} needs --data; a task has its own settings.")
    if args.n < 0:
        raise UserError(f"-n is {args.n}: it must be at least 0.")
    lengths = parse_lengths(args.lengths)
    import_modules(args)
    work_begins()
    found = get_mixture_or_task(args.name) if args.name else _file_task(options, args.split)
    sys.stdout.reconfigure(errors="backslashreplace")
    is_terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((80, 24)).columns, 120) if is_terminal else 80
    page = Page(width, bold=is_terminal and "NO_COLOR" not in os.environ)
    DataReport(page, found, split=args.split, lengths=lengths, pack=args.pack, seed=args.seed).write(args.n)


def _file_task(options: dict[str, str], split: str) -> "Task":
    from t5x.data.file_tasks import file_task
    from t5x.data.vocabularies.loading import vocabulary_named

    if "vocabulary" not in options:
        raise UserError("--data needs --vocabulary: a SentencePiece model (*.model), a tokenizer.json, or bytes.")
    vocabulary = vocabulary_named(options["vocabulary"]).load()
    fields = {name: options[name] for name in ("inputs", "targets", "prefix") if name in options}
    return file_task({split: options["data"]}, vocabulary, **fields, name="file")


def parse_lengths(text: str | None) -> dict[str, int] | None:
    """Parse lengths of features.

    >>> parse_lengths("inputs=512,targets=114")
    {'inputs': 512, 'targets': 114}
    """
    if text is None:
        return None
    lengths = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name.strip() or not number.strip().isdigit() or int(number) < 1:
            raise UserError(f"--lengths {text}: write it as inputs=512,targets=114, with lengths of at least 1.")
        lengths[name.strip()] = int(number)
    return lengths
