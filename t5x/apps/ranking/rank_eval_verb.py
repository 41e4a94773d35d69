"""`t5x rank-eval`: its arguments and the call of its entry point."""

import argparse
import os

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.apps.ranking.ranking_options import MeasureOptions
from t5x.cli.parser import VerbParser, add_options, passed_options


def define(parser: VerbParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="TREC or MS MARCO runs; the first is the baseline")
    parser.add_argument("--qrels", metavar="FILE", required=True, help="the judgments")
    add_options(parser, MeasureOptions)
    parser.add_argument("--missing_as_zero", action="store_true", help="count judged queries that a run lacks as 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--per_query", metavar="FILE", help="write the values of every query, as JSON lines")
    parser.set_help(
        "Score runs with judgments, as trec_eval does, and test whether they differ significantly.",
        """
        printf '1 0 a 1\\n' > qrels.txt; printf '1 Q0 b 1 2.0 x\\n1 Q0 a 2 1.0 x\\n' > run.trec
        t5x rank-eval --qrels qrels.txt run.trec
        t5x rank-eval --qrels qrels.txt --measures mrr@10,recall@1000 --relevance_level 2 run.trec
        """,
    )


def run(args: argparse.Namespace) -> None:
    work_begins()
    from t5x.apps.ranking import ranking_files

    names = [os.path.basename(path) for path in args.runs]
    if len(set(names)) < len(names):
        names = args.runs
    if len(set(names)) < len(names):
        repeated = next(path for path in args.runs if args.runs.count(path) > 1)
        raise UserError(f"The run {repeated} is given twice. Remove one of them.")
    runs = {name: ranking_files.read_run(path) for name, path in zip(names, args.runs, strict=True)}
    options = MeasureOptions(**passed_options(args, MeasureOptions))
    report = ranking_files.evaluation_report(
        ranking_files.read_qrels(args.qrels), runs, options.measures, relevance_level=options.relevance_level,
        missing_as_zero=args.missing_as_zero, per_query_path=args.per_query, as_json=args.json,
    )  # fmt: skip
    print(report)
