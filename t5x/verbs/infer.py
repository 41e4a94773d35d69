"""`t5x infer`: its arguments and the call of its entry point."""

import argparse
import signal

from t5x.errors import UserError
from t5x.verbs.arguments import (
    add_gin,
    add_model,
    describe,
    import_modules,
    leave_in_order,
    processes,
    run_gin,
    work_begins,
)


def define(parser: argparse.ArgumentParser) -> None:
    file = parser.add_argument_group("for a file, with a model directory alone")
    file.add_argument("--model", metavar="DIR", help="a checkpoint, or a MODEL_DIR (its newest whole one is taken)")
    file.add_argument("--input", metavar="FILE", help="text, one input a line, or .jsonl; - is standard input")
    file.add_argument("--output", metavar="FILE", help="JSON lines; - is standard output (default)")
    file.add_argument("--mode", choices=("predict", "score"), help='or score given "targets" (default: predict)')
    file.add_argument("--max_length", type=int, metavar="N", help="tokens generated at most (128)")
    file.add_argument(
        "--max_input_length", type=int, metavar="N", help="longer inputs, and targets to score, are cut (512)"
    )
    file.add_argument("--long", choices=("truncate", "error"), help="cut longer inputs (default), or refuse them")
    file.add_argument("--batch_size", type=int, metavar="N", help="inputs computed together (32)")
    file.add_argument("--checkpoint_period", type=int, metavar="N", help="batches after which results are kept (16)")
    file.add_argument("--output_ids", action="store_true", default=None, help="also write prediction_tokens")
    file.add_argument(
        "--overwrite",
        action="store_true",
        default=None,
        help="replace an output file that exists, and chunks of another run",
    )
    add_model(file)
    decoding = parser.add_argument_group("decoding, with --model", "greedy, unless told otherwise")
    decoding.add_argument(
        "--beams",
        type=int,
        metavar="N",
        help="beam search (1, greedy); scores are divided by T5X's ((5 + length) / 6) ** 0.6",
    )
    decoding.add_argument(
        "--length_penalty", type=float, metavar="X", help="of beams: divide by length ** X, as Hugging Face does"
    )
    decoding.add_argument("--num_return", type=int, metavar="N", help="results for an input at most, best first (1)")
    decoding.add_argument("--temperature", type=float, metavar="X", help="sample")
    decoding.add_argument("--top_k", type=int, metavar="N", help="sample from the likeliest tokens")
    decoding.add_argument("--top_p", type=float, metavar="X", help="sample from tokens of this probability together")
    decoding.add_argument("--seed", type=int, metavar="N", help="of samples (0)")
    decoding.add_argument("--min_length", type=int, metavar="N", help="tokens generated at least, below --max_length")
    decoding.add_argument("--no_repeat_ngram", type=int, metavar="N", help="so many tokens never stand there twice")
    decoding.add_argument("--repetition_penalty", type=float, metavar="X", help="above 1: fewer repeated tokens")
    decoding.add_argument("--choices", metavar="FILE", help="only these texts, one a line, may come out")
    shards = parser.add_argument_group("parts of the input, each by a program of its own")
    shards.add_argument("--num_shards", type=int, metavar="N", help="how many (1)")
    shards.add_argument("--shard_id", type=int, metavar="I", help="which of them this one does, from 0")
    add_gin(parser)
    describe(
        parser,
        "Write a model's predictions or scores: for a file with --model and --input, or for a task with gin files. "
        "Stopped and started again, it goes on.",
        """
        t5x infer --model runs/demo --input dates.txt --output predictions.jsonl
        t5x infer --model google/flan-t5-small --input in.jsonl --output out.jsonl --beams 4 --max_length 64
        echo "the third of March '97" | t5x infer --model runs/demo --input -
        t5x infer --gin_file=t5x/configs/runs/infer.gin --gin_file=my_model.gin --gin.CHECKPOINT_PATH=… …
        """,
    )


_INFER_FILE = (
    "output", "mode", "max_length", "max_input_length", "long", "batch_size", "checkpoint_period", "output_ids",
    "overwrite", "vocabulary", "dtype", "beams", "length_penalty", "num_return", "temperature", "top_k", "top_p",
    "seed", "min_length", "no_repeat_ngram", "repetition_penalty", "choices",
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in _INFER_FILE if getattr(args, name) is not None}
    shard = {name: getattr(args, name) for name in ("num_shards", "shard_id") if getattr(args, name) is not None}
    if args.model is None:
        if given or args.input is not None:
            flags = ", ".join(f"--{name}" for name in (["input"] if args.input else []) + list(given))
            raise UserError(
                f"{flags} goes with --model; a run by gin files has gin parameters for it (infer_script.infer)."
            )
        from t5x.infer import infer

        if args.gin_file or args.gin_bindings:
            args.gin_bindings += [f"infer.{name} = {value}" for name, value in shard.items()]
        return run_gin(args, infer)
    if args.gin_file or args.gin_bindings or args.dry_run:
        raise UserError(
            "--model takes all from the checkpoint; leave out --gin_file, --gin.… and --dry_run, or --model."
        )
    if args.tfds_data_dir or args.seqio_additional_cache_dirs:
        raise UserError("--tfds_data_dir and --seqio_additional_cache_dirs are for tasks: leave them out, or --model.")
    if args.input is None:
        raise UserError("--model needs --input: a text file, a .jsonl file, or - for standard input.")
    if "choices" in given:
        from t5x.inference.input_lines import read_texts

        given["choices"] = read_texts(given["choices"], "--choices")
    import_modules(args)  # they may define classes, such as a vocabulary
    # Before `work_begins`: until then a signal ends the process at once.
    from t5x.inference.file_inference import infer_file

    work_begins()
    signal.signal(signal.SIGTERM, leave_in_order)
    with processes(args):
        infer_file(args.model, args.input, **given, **shard)
    return None
