"""`t5x infer`: its arguments and the call of its entry point."""

import argparse
import dataclasses

from t5x._runtime.errors import UserError
from t5x.cli import file_options
from t5x.cli.file_options import DataOptions
from t5x.cli.options import (
    DTYPE,
    JOB_OPTIONS,
    SHARD_OPTIONS,
    add_batches,
    add_gin,
    add_output,
    add_shards,
    flags,
    given_options,
    job_process,
    refuse_gin,
    run_gin,
)
from t5x.cli.parser import VerbParser, add_options, choice, flag, option, passed_options

_FROM_FILE = "--model runs/demo --input -"
_FROM_GIN = "--gin_file=t5x/configs/runs/infer.gin --gin_file=my_model.gin --gin.CHECKPOINT_PATH=runs/mine"


@dataclasses.dataclass(kw_only=True)
class FileInference:
    """What `t5x infer --model` computes."""

    mode: str | None = choice(("predict", "score"), 'score: of given "targets" (default: predict)')
    long: str | None = choice(("truncate", "error"), "truncate longer inputs (default), or refuse them")
    output_ids: bool = flag("also write prediction_tokens")
    dtype: str | None = dataclasses.field(default=None, metadata=DTYPE)


@dataclasses.dataclass(kw_only=True)
class DecodingOptions:
    """How `t5x infer --model` generates."""

    beams: int | None = option("N", "beam search (1, greedy); scores are divided by T5X's ((5 + length) / 6) ** 0.6")
    length_penalty: float | None = option("X", "divide beam scores by length ** X, as Hugging Face does")
    num_return: int | None = option("N", "maximum results per input, best first (1)")
    temperature: float | None = option("X", "sample with this temperature")
    top_k: int | None = option("N", "sample from the N most probable tokens")
    top_p: float | None = option("X", "sample from the most probable tokens of total probability X")
    seed: int | None = option("N", "seed of samples (0)")
    min_length: int | None = option("N", "minimum generated tokens, below --max_length")
    no_repeat_ngram: int | None = option("N", "never repeat N consecutive tokens")
    repetition_penalty: float | None = option("X", "above 1: fewer repeated tokens")
    choices: str | None = option("FILE", "the only possible outputs, one per line")


def define(parser: VerbParser) -> None:
    file = parser.add_argument_group("a file, with only a model directory")
    file.add_argument("--model", metavar="DIR", help="a checkpoint, or a MODEL_DIR (its newest complete checkpoint)")
    file.add_argument(
        "--input", "--data", metavar="FILE",
        help="text (an input per line), .jsonl, .tsv, .csv or .parquet; - is standard input",
    )  # fmt: skip
    add_output(file, "JSON lines")
    add_options(file, FileInference)
    add_batches(file, "inputs", checkpoint_period=16)
    file_options.add(parser, "how the file is read (default: as the model was trained)", DataOptions)
    add_options(parser.add_topic("decoding", "decoding, with --model", "Greedy by default."), DecodingOptions)
    add_shards(parser)
    add_gin(parser)
    parser.set_help(
        "Write a model's predictions or scores: for a file with --model and --input, or for a task with gin files. A "
        "run that was interrupted resumes.",
        f"""
        echo "the third of March '97" | t5x infer {_FROM_FILE}
        t5x infer --model google/flan-t5-small --input test.tsv --output predictions.jsonl --beams 4
        t5x infer {_FROM_GIN}
        """,
    )


def run(args: argparse.Namespace) -> None:
    options = given_options(args, JOB_OPTIONS) | passed_options(args, FileInference, DataOptions, DecodingOptions)
    if "max_target_length" in options:
        options["max_length"] = options.pop("max_target_length")
    shard = given_options(args, SHARD_OPTIONS)
    if args.model is None:
        if unused := [*given_options(args, ("input",)), *options]:
            raise UserError(
                f"{flags(unused)} can only be used with --model; with gin files, bind parameters (infer_script.infer)."
            )
        from t5x.runs.infer import infer

        if args.gin_file or args.gin_bindings:
            args.gin_bindings += [f"infer.{name} = {value}" for name, value in shard.items()]
        return run_gin(args, infer, (_FROM_FILE, _FROM_GIN))
    refuse_gin(args)
    if args.input is None:
        raise UserError("--model needs --input: a file (text, .jsonl, .tsv, .csv, .parquet), or - for standard input.")
    if "choices" in options:
        from t5x.inference.input_lines import read_texts

        options["choices"] = read_texts(options["choices"], "--choices")
    # Before `job_process`: until then a signal ends the process at once.
    from t5x.inference.file_inference import infer_file

    with job_process(args):
        infer_file(args.model, args.input, **options, **shard)
    return None
