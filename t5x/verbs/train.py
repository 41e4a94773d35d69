"""`t5x train`: its arguments and the call of its entry point."""

import argparse

from t5x.verbs import file_options
from t5x.verbs.arguments import add_gin, processes, run_gin, work_begins
from t5x.verbs.file_options import FileTraining
from t5x.verbs.verb_parser import VerbParser

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


def run(args: argparse.Namespace) -> None:
    given = file_options.given(args, FileTraining)
    if not given:
        from t5x.train import train

        run_gin(args, train, (_FROM_FILE, _FROM_GIN))
        return
    options = file_options.check(args)
    from t5x.verbs.file_training import train_file

    work_begins()
    train_file(
        options,
        bindings=args.gin_bindings,
        dry_run=args.dry_run,
        strict=args.strict,
        command=file_options.command("train", given, args.gin_bindings),
        processes=processes(args),
    )
