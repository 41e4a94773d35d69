"""`t5x data`: its arguments and the call of its entry point."""

import argparse
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING

from t5x._runtime.errors import UserError, check_at_least
from t5x._runtime.signals import work_begins
from t5x.cli import file_options
from t5x.cli.file_options import FileReport
from t5x.cli.options import add_import, flags, import_modules
from t5x.cli.parser import VerbParser, passed_options

if TYPE_CHECKING:
    from t5x.data.tasks import Task


def define(parser: VerbParser) -> None:
    parser.add_argument("name", metavar="TASK", nargs="?", help="a registered task or mixture, unless --data is given")
    add_import(parser)
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="examples to show (5)")
    parser.add_argument("--lengths", metavar="L", help="feature lengths of training: inputs=512,targets=114")
    parser.add_argument("--pack", action="store_true", help="show a packed row")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order and of preprocessors (0)")
    file_options.add(parser, "data file (without a task)", FileReport)
    parser.set_help(
        "Show the examples of a task, a mixture or a data file: the result of each preprocessor, tokens, a row of a "
        "batch, lengths, padding and truncation.",
        """
        t5x data --data train.tsv --inputs question --targets answer --model google/flan-t5-small
        t5x data --data test.tsv --model runs/mine
        t5x data dates --import t5x.examples.demo.dates --lengths inputs=64,targets=16 --pack
        """,
    )


def run(args: argparse.Namespace) -> None:
    from t5x.cli.data_report import DataReport
    from t5x.cli.text_page import TextPage
    from t5x.data.tasks import get_mixture_or_task

    options = passed_options(args, FileReport)
    if (args.name is None) == ("data" not in options):
        raise UserError(
            "Pass a task, `t5x data my_task --import my_tasks.py`, or a file, `t5x data --data train.jsonl`."
        )
    if args.name and options:
        raise UserError(f"{flags(options)} needs --data; a task has its own settings.")
    check_at_least(0, "-", n=args.n)
    lengths = parse_lengths(args.lengths)
    import_modules(args)
    work_begins()
    if args.name:
        task = get_mixture_or_task(args.name)
    else:
        task, training_lengths = _file_task(FileReport(**options), args.split)
        lengths = lengths or training_lengths
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    is_terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((80, 24)).columns, 120) if is_terminal else 80
    page = TextPage(width, bold=is_terminal and "NO_COLOR" not in os.environ)
    DataReport(page, task, split=args.split, lengths=lengths, pack=args.pack, seed=args.seed).write(args.n)


def _file_task(options: FileReport, split: str) -> "tuple[Task, dict[str, int] | None]":
    """Return the task of a file, and the lengths of training with these options; None if there is none."""
    from t5x.data.file_tasks import file_task
    from t5x.data.vocabularies.loading import vocabulary_named

    if options.model is not None:
        from t5x.inference.loaded import open_model

        source, model = open_model(options.model, options.vocabulary)
        vocabulary, data = model.output_vocabulary, options.description(source.data, source.path)
    elif options.vocabulary is not None:
        vocabulary, data = vocabulary_named(options.vocabulary).load(), options.description()
    else:
        raise UserError(
            "--data needs the vocabulary of a model: --model CHECKPOINT, or --vocabulary with a SentencePiece model "
            "(*.model), a tokenizer.json, or bytes."
        )
    lengths = {"inputs": data.max_input_length, "targets": data.max_target_length}
    is_known = options.model or options.max_input_length or options.max_target_length
    task = file_task(
        {split: options.data}, vocabulary, data.inputs, data.targets, data.prefix, name="file", columns=data.columns
    )
    return task, lengths if is_known else None


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
