"""`t5x eval`: its arguments and the call of its entry point."""

import argparse

from t5x.cli import file_options
from t5x.cli.file_options import FileEvaluation
from t5x.cli.options import add_gin, job_process, refuse_gin, run_gin
from t5x.cli.parser import VerbParser, passed_options

_FROM_FILE = "--model runs/mine --data test.tsv"
_FROM_GIN = (
    "--gin_file=t5x/examples/demo/dates_eval.gin --gin.CHECKPOINT_PATH=runs/demo --gin.EVAL_OUTPUT_DIR=runs/eval"
)


def define(parser: VerbParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON line for each step and task, not a table")
    file_options.add(parser, "data file (with a model directory, no gin)", FileEvaluation)
    add_gin(parser)
    parser.set_help(
        "Score a checkpoint, or every checkpoint of a run: on a data file with --model and --data, or with the metrics "
        "of a task with gin files. Prints a table. The same command resumes an interrupted evaluation.",
        f"""
        t5x eval {_FROM_FILE} --metric bleu --metric chrf
        t5x eval --model runs/mine --all --data test.tsv --metric accuracy --output runs/mine_eval
        t5x eval {_FROM_GIN}
        """,
    )


def run(args: argparse.Namespace) -> None:
    if passed := passed_options(args, FileEvaluation):
        options = file_options.parsed(args, FileEvaluation)
        refuse_gin(args)
        with job_process(args):
            from t5x.cli.file_evaluation import evaluate_file

            command = file_options.command("eval", {"model": options.model, **passed})
            results = evaluate_file(options, command=command)
    else:
        from t5x.runs.eval import evaluate

        results = run_gin(args, evaluate, (_FROM_FILE, _FROM_GIN))
    if results is None:
        return
    import jax

    from t5x.cli.file_evaluation import print_results

    if jax.process_index() == 0:
        print_results(results, as_json=args.json)
