"""`t5x precompile`: its arguments and the call of its entry point."""

import argparse

from t5x.cli.options import add_gin, run_gin
from t5x.cli.parser import VerbParser

_EXAMPLE = (
    "--gin_file=t5x/examples/t5/t5_1_1/small.gin --gin_file=t5x/configs/runs/precompile.gin --gin.MODEL_DIR=runs/hlo "
    "--import t5x.examples.demo.dates --gin.MIXTURE_OR_TASK_NAME=dates --gin.VOCABULARY='@seqio.ByteVocabulary()' "
    '--gin.TASK_FEATURE_LENGTHS=\'{"inputs": 64, "targets": 32}\' --gin.DROPOUT_RATE=0.1'
)


def define(parser: VerbParser) -> None:
    add_gin(parser)
    parser.set_help("Compile a training step and write its HLO, before and after optimization.", f"""
        t5x precompile {_EXAMPLE}
        """)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    from t5x.runs.precompile import precompile
    from t5x.runs.train import train  # gin files of a training run configure it too

    run_gin(args, precompile, [_EXAMPLE], others=[train])
