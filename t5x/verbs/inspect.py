"""`t5x inspect`: its arguments and the call of its entry point."""

import argparse

from t5x.verbs.arguments import work_begins


def define(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say what a checkpoint is: format, step, model, parameters. Any format, T5X's and others'."
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a MODEL_DIR")
    parser.add_argument("--json", action="store_true", help="as JSON, with a hash of all parameters")
    parser.epilog = "example:\n  t5x inspect runs/demo"


def run(args: argparse.Namespace) -> None:
    from t5x.inspection import inspect

    work_begins()
    inspect(args.path, as_json=args.json)
