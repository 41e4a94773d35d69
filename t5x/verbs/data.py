"""`t5x data`: its arguments and the call of its entry point."""

import argparse

from t5x.verbs import file_options
from t5x.verbs.arguments import add_import, import_modules, work_begins


def define(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the examples of a task, a mixture or a data file: each preprocessor's work, tokens, a row of a batch, "
        "lengths, padding, and what is cut."
    )
    parser.add_argument("name", metavar="TASK", nargs="?", help="a registered task or mixture, unless --data is given")
    add_import(parser)
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="examples to show (5)")
    parser.add_argument("--lengths", metavar="L", help="as training would have them: inputs=512,targets=114")
    parser.add_argument("--pack", action="store_true", help="show a packed row")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order and of random steps (0)")
    file_options.add_file(parser, "data file (without a task)")
    parser.epilog = (
        "examples:\n  t5x data my_task --import my_tasks.py --lengths inputs=512,targets=64 --pack\n"
        "  t5x data --data train.jsonl --inputs question --targets answer --vocabulary spiece.model"
    )


def run(args: argparse.Namespace) -> None:
    from t5x.data.view import view_named

    options = {name: value for name, value in file_options.given(args).items() if name != "seed"}
    import_modules(args)
    work_begins()
    view_named(args.name, options, split=args.split, count=args.n, lengths=args.lengths, pack=args.pack, seed=args.seed)
