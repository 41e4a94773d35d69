"""`t5x demo`: its arguments and the call of its entry point."""

import argparse
import os


def define(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a tiny byte-level T5 to write dates as ISO dates, on this machine, and show what it learned."
    )
    parser.add_argument("--model_dir", default=os.path.join("runs", "demo"), metavar="DIR", help="default: runs/demo")
    parser.set_defaults(gin_bindings=[])


def run(args: argparse.Namespace) -> None:
    from t5x.demo import demo

    demo(args.model_dir, bindings=args.gin_bindings)
