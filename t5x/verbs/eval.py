"""`t5x eval`: its arguments and the call of its entry point."""

import argparse
import shlex
import signal
from typing import Any

from t5x.errors import UserError
from t5x.verbs import file_options
from t5x.verbs.arguments import (
    DTYPE,
    add_gin,
    describe,
    import_modules,
    leave_in_order,
    processes,
    run_gin,
    work_begins,
)


def define(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON line for each step and task, not a table")
    file_options.add_file(parser, "data file (with a model directory, no gin)")
    plain = parser.add_argument_group("and with it")
    plain.add_argument("--model", metavar="DIR", help="any checkpoint that `t5x inspect` knows, or a MODEL_DIR")
    plain.add_argument("--all", action="store_true", default=None, help="every checkpoint of the MODEL_DIR")
    plain.add_argument("--metric", action="append", metavar="NAME", help="bleu, chrf, rouge, squad, accuracy, … of "
                       "t5x.metrics; may be repeated (exact_match)")  # fmt: skip
    plain.add_argument("--beams", type=int, metavar="N", help="beam search (1, greedy)")
    plain.add_argument("--max_length", type=int, metavar="N", help="tokens generated at most (128)")
    plain.add_argument("--max_input_length", type=int, metavar="N", help="longer inputs are cut (512 tokens)")
    plain.add_argument("--batch_size", type=int, metavar="N", help="examples computed together (32)")
    plain.add_argument("--dtype", **DTYPE)
    plain.add_argument("--output", metavar="DIR", help="for predictions and metrics (default: they are only printed)")
    plain.add_argument("--skip_bad_examples", action="store_true", default=None, help="pass over unreadable lines")
    add_gin(parser)
    describe(
        parser,
        "Score a checkpoint, or every checkpoint of a run: on a plain file with --model and --data, or with the "
        "metrics of a task with gin files. Prints a table; stopped and started again, it goes on.",
        """
        t5x eval --model runs/mine --data test.jsonl --inputs en --targets de --metric bleu --metric chrf
        t5x eval --model runs/mine --all --data valid.tsv --metric accuracy --output runs/mine_eval
        t5x eval --gin_file=t5x/examples/demo/dates_eval.gin --gin.CHECKPOINT_PATH=runs/demo \\
            --gin.EVAL_OUTPUT_DIR=runs/demo_eval
        """,
    )


_EVAL_FILE = (
    "model", "data", "inputs", "targets", "prefix", "vocabulary", "all", "metric", "beams", "max_length",
    "max_input_length", "batch_size", "dtype", "output", "skip_bad_examples",
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in _EVAL_FILE if getattr(args, name) is not None}
    if not given:
        from t5x.eval import evaluate

        signal.signal(signal.SIGTERM, leave_in_order)
        results = run_gin(args, evaluate)
    else:
        results = _eval_file(args, given)
    if results is None:
        return
    import jax

    from t5x.verbs.results_table import print_results

    if jax.process_index() == 0:
        print_results(results, as_json=args.json)


def _eval_file(args: argparse.Namespace, given: dict[str, Any]) -> Any:
    if missing := [f"--{name}" for name in ("model", "data") if name not in given]:
        flags = ", ".join(f"--{name}" for name in given)
        raise UserError(f"{flags} needs {' and '.join(missing)} too; a run by gin files has gin parameters for it.")
    if args.gin_file or args.gin_bindings or args.dry_run:
        raise UserError(
            "--model takes all from the checkpoint; leave out --gin_file, --gin.… and --dry_run, or --model."
        )
    if args.tfds_data_dir or args.seqio_additional_cache_dirs:
        raise UserError("--tfds_data_dir and --seqio_additional_cache_dirs are for tasks: leave them out, or --model.")
    import_modules(args)  # they may define classes, such as a vocabulary
    work_begins()
    signal.signal(signal.SIGTERM, leave_in_order)
    with processes(args):
        from t5x.verbs.eval_from_files import FileEvaluation, evaluate_file

        words = [word for name, value in given.items() for word in _as_flag(name, value)]
        return evaluate_file(FileEvaluation(**given), command=shlex.join(["t5x", "eval", *words]))


def _as_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for one in value for word in _as_flag(name, one)]
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]
