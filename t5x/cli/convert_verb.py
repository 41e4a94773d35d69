"""`t5x convert`: its arguments and the call of its entry point."""

import argparse

from t5x._runtime.signals import work_begins
from t5x.cli.parser import VerbParser


def define(parser: VerbParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or a MODEL_DIR")
    parser.add_argument("destination", metavar="DST", help="the directory to create, local or remote")
    parser.add_argument("--to", required=True, choices=("t5x", "native", "hf"), help="the format to write")
    parser.add_argument(
        "--layers", choices=("unrolled", "scanned"), default="unrolled", help="one array per layer, or stacked"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the parameters (default: unchanged)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing destination")
    parser.set_help(
        "Convert a checkpoint of any format to ours (t5x), native T5X (native) or Hugging Face (hf).",
        "t5x convert runs/demo demo_hf --to hf",
    )


def run(args: argparse.Namespace) -> None:
    from t5x.checkpoints.convert import convert

    work_begins()
    convert(args.source, args.destination, to=args.to, layers=args.layers, dtype=args.dtype, overwrite=args.overwrite)
