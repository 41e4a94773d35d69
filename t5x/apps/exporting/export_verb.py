"""`t5x export`: its arguments and the call of its entry point."""

import argparse
import os
from typing import TYPE_CHECKING

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.cli.options import add_gin, run_gin
from t5x.cli.parser import VerbParser

if TYPE_CHECKING:
    from t5x.apps.exporting.checking import Sample

_FORMATS = ("savedmodel", "stablehlo", "hf", "ctranslate2", "onnx")
_DIRECT = "runs/demo models/demo/1 --format savedmodel --beams 4"
_FROM_GIN = "--gin_file=t5x/configs/runs/export.gin --gin_file=my_model.gin --gin.CHECKPOINT_PATH=runs/mine"


def define(parser: VerbParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint, or a MODEL_DIR")
    parser.add_argument("destination", metavar="DEST", nargs="?", help="the directory to create")
    parser.add_argument("--format", choices=_FORMATS, help="the format to write")
    parser.add_argument("--vocabulary", metavar="V", help="a SentencePiece model or tokenizer.json, if it has none")
    parser.add_argument("--int8", action="store_true", help="weights in int8 (savedmodel, stablehlo, ctranslate2)")
    parser.add_argument(
        "--sample", metavar="FILE", help="inputs (text), or inputs and targets (.jsonl, …), for the loss with --int8"
    )
    programs = parser.add_argument_group("savedmodel and stablehlo")
    programs.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the activations (float32)")
    programs.add_argument("--max_input_length", type=int, metavar="N", default=512, help="tokens of an input (512)")
    programs.add_argument("--max_length", type=int, metavar="N", default=128, help="maximum generated tokens (128)")
    programs.add_argument("--beams", type=int, metavar="N", default=1, help="beam search (1, greedy)")
    programs.add_argument("--num_return", type=int, metavar="N", default=1, help="results per input, best first (1)")
    programs.add_argument("--length_penalty", type=float, metavar="X", help="of beams, as Hugging Face's")
    programs.add_argument(
        "--platforms", metavar="A,B", default="cpu,cuda,tpu", help="where stablehlo can run (cpu,cuda,tpu)"
    )
    programs.add_argument("--token_ids", action="store_true", help="savedmodel: token ids in and out, not strings")
    programs.add_argument("--batch_size", type=int, metavar="N", help="savedmodel: the only batch size (any)")
    programs.add_argument("--warmup", metavar="FILE", help="savedmodel: inputs that TF Serving runs before it is ready")
    add_gin(parser)
    parser.set_help(
        "Export a model to another format. The export is compared with the original, and discarded if it is wrong.",
        f"""
        t5x export {_DIRECT}
        t5x export google/flan-t5-small flan_ct2 --format ctranslate2 --int8
        t5x export {_FROM_GIN}
        """,
    )


def run(args: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # programs for all platforms are traced without kernels of one
    if args.gin_file or args.gin_bindings or args.model is None:
        if args.model is not None or args.format is not None:
            raise UserError("Gin files configure the whole export: remove MODEL, DEST and --format, or the gin files.")
        from t5x.apps.exporting.t5x_api import save

        run_gin(args, save, [_DIRECT, _FROM_GIN])
        return
    if args.destination is None or args.format is None:
        raise UserError(f"`t5x export` needs MODEL, DEST and --format, e.g. t5x export {_DIRECT}")
    from t5x.apps.exporting import exporter
    from t5x.inference.generation import Decoding
    from t5x.inference.input_lines import read_texts

    work_begins()
    exporter.export(
        args.model, args.destination, args.format, vocabulary=args.vocabulary, dtype=args.dtype, int8=args.int8,
        sample=_sample(args.sample) if args.sample else None,
        max_input_length=args.max_input_length, max_length=args.max_length,
        decoding=Decoding(beams=args.beams, num_return=args.num_return, length_penalty=args.length_penalty),
        platforms=args.platforms.split(","), token_ids=args.token_ids, batch_size=args.batch_size,
        warmup=read_texts(args.warmup, "--warmup") if args.warmup else (),
    )  # fmt: skip


def _sample(path: str) -> "Sample":
    """Return the inputs of a text file, or the inputs and targets of a .jsonl, .tsv, .csv or .parquet file."""
    from t5x.apps.exporting.checking import Sample
    from t5x.data.file_tasks import ENDINGS, ending_of
    from t5x.inference.input_lines import Lines, read_texts

    if ending_of(path) not in ENDINGS:
        return Sample(read_texts(path, "--sample"))
    lines = [line for line in Lines(path, needs_targets=True) if line is not None]
    return Sample([line.inputs for line in lines], [line.targets for line in lines])
