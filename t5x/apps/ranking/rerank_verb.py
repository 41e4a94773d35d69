"""`t5x rerank`: its arguments and the call of its entry point."""

import argparse

from t5x._runtime.errors import UserError
from t5x.apps.ranking import ranking_options
from t5x.apps.ranking.ranking_options import MeasureOptions, RerankOptions
from t5x.cli.options import add_import, add_processes, add_shards, flags, job_process
from t5x.cli.parser import VerbParser, add_options, passed_options


def define(parser: VerbParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True, help="a ranker: a checkpoint, or a MODEL_DIR")
    add_options(parser.add_argument_group("input, one of"), ranking_options.RankingInput)
    add_options(parser.add_argument_group("with --run"), ranking_options.RunOptions)
    output = parser.add_argument_group("output")
    add_options(output, ranking_options.RankingOutput)
    add_options(output, MeasureOptions)
    model = parser.add_argument_group("model")
    add_options(model, ranking_options.RankerOptions)
    add_import(model)
    add_options(
        parser.add_topic("template", "inputs of the model (by default the checkpoint's)"),
        ranking_options.TemplateOptions,
    )
    add_options(parser.add_topic("windows", "long passages"), ranking_options.WindowOptions)
    title = "a second model that compares pairs of the top passages"
    add_options(parser.add_topic("pairwise", title), ranking_options.PairwiseOptions)
    add_shards(parser)
    add_processes(parser)
    parser.set_help(
        "Rank passages by their relevance to queries. A run that was interrupted resumes.",
        """
        t5x rerank --model castorini/monot5-base-msmarco --run bm25.trec --collection collection.tsv \\
            --topics topics.tsv --output monot5.trec --qrels qrels.txt
        printf 'what is a quark?\\tA quark is a particle.\\n' |
            t5x rerank --model castorini/monot5-base-msmarco --input - --format jsonl
        """,
    )


_NEEDS = {
    "max_p": ("window", "stride"),
    "pairwise": ("pairwise_top", "pairwise_labels"),
    "qrels": ("measures", "relevance_level"),
}


def run(args: argparse.Namespace) -> None:
    passed = passed_options(args, RerankOptions)
    for needed, names in _NEEDS.items():
        if needed not in passed and (unused := [name for name in names if name in passed]):
            raise UserError(f"{flags(unused)} can only be used with --{needed}.")
    options = RerankOptions(**passed)
    with job_process(args):
        from t5x.apps.ranking.rerank_job import rerank

        rerank(options)
