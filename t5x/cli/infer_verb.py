"""`t5x infer`: its arguments and the call of its entry point."""

import argparse

from t5x._runtime.errors import UserError
from t5x.cli import file_options
from t5x.cli.file_options import DataOptions, DecodingOptions, FileInference, InferenceOptions
from t5x.cli.options import ShardOptions, add_gin, add_shards, flags, job_process, refuse_gin, run_gin
from t5x.cli.parser import VerbParser, add_options, passed_options

_FROM_FILE = "--model runs/demo --input -"
_FROM_GIN = "--gin_file=t5x/configs/runs/infer.gin --gin_file=my_model.gin --gin.CHECKPOINT_PATH=runs/mine"


def define(parser: VerbParser) -> None:
    file_options.add(parser, "a file, with only a model directory", InferenceOptions)
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
    passed, shard = passed_options(args, FileInference), passed_options(args, ShardOptions)
    if args.model is None:
        if unused := [name for name in passed if name not in shard]:
            names = flags(unused).replace("max_target_length", "max_length")
            raise UserError(
                f"{names} can only be used with --model; with gin files, bind parameters (infer_script.infer)."
            )
        from t5x.runs.infer import infer

        if args.gin_file or args.gin_bindings:
            args.gin_bindings += [f"infer.{name} = {value}" for name, value in shard.items()]
        return run_gin(args, infer, (_FROM_FILE, _FROM_GIN))
    refuse_gin(args)
    if args.input is None:
        raise UserError("--model needs --input: a file (text, .jsonl, .tsv, .csv, .parquet), or - for standard input.")
    # Before `job_process`: until then a signal ends the process at once.
    from t5x.cli.file_inference import infer_file

    with job_process(args):
        infer_file(FileInference(**passed))
    return None
