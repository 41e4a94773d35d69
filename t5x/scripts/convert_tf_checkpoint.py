"""T5X's program that converts a Mesh TensorFlow checkpoint to its native format; `t5x convert` needs no gin file."""

import argparse
import logging

import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x.checkpoints import convert
from t5x.checkpoints.formats import open_checkpoint
from t5x.cli.options import add_gin, run_gin
from t5x.cli.parser import VerbParser
from t5x.models import BaseTransformerModel

log = logging.getLogger(__name__)


def convert_checkpoint(
    model: BaseTransformerModel,
    tf_checkpoint_path: str,
    output_dir: str,
    save_dtype: DTypeLike = "float32",
    concurrent_gb: int = 16,
) -> None:
    """Write `<output_dir>/checkpoint_<step>`.

    Args:
      model: the model of the checkpoint. Its network decides whether layers are stacked.
      tf_checkpoint_path: for example `model.ckpt-1000000`; any other format that `t5x inspect` reads works too.
      output_dir: directory or URL.
      save_dtype: dtype of the parameters: float32 or bfloat16.
      concurrent_gb: ignored; one array is converted at a time.
    """
    del concurrent_gb
    source = open_checkpoint(tf_checkpoint_path)
    stacked = getattr(getattr(model.module, "config", None), "scan_layers", False)
    convert.convert(
        source,
        f"{output_dir.rstrip('/')}/checkpoint_{source.step or 0}",
        to="native",
        layers="scanned" if stacked else "unrolled",
        dtype=jnp.dtype(save_dtype).name,
    )


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
    run_gin(args, convert_checkpoint, [_EXAMPLE])


if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("convert-tf-checkpoint")
