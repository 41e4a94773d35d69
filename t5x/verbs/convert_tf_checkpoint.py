"""The arguments of `t5x/scripts/convert_tf_checkpoint.py` and the call of its entry point; not a verb of `t5x`."""

import argparse

from t5x.verbs.arguments import add_gin, run_gin
from t5x.verbs.verb_parser import VerbParser

_EXAMPLE = (
    "--gin_file=t5x/examples/t5/t5_1_1/small.gin --gin.DROPOUT_RATE=0.0 --gin.convert_checkpoint.model=%MODEL "
    "--gin.convert_checkpoint.tf_checkpoint_path=model.ckpt-1000000 --gin.convert_checkpoint.output_dir=converted"
)


def define(parser: VerbParser) -> None:
    parser.prog = "convert_tf_checkpoint.py"
    add_gin(parser)
    parser.set_help("Convert a Mesh TensorFlow checkpoint to T5X's native format. `t5x convert` does the same.", f"""
        python t5x/scripts/convert_tf_checkpoint.py {_EXAMPLE}
        """)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    from t5x.scripts.convert_tf_checkpoint import convert_checkpoint

    run_gin(args, convert_checkpoint, [_EXAMPLE])
