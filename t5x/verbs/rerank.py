"""`t5x rerank`: its arguments and the call of its entry point."""

import argparse

from t5x.errors import UserError
from t5x.verbs.arguments import add_import, add_model, add_processes, flags, given_options
from t5x.verbs.job_options import add_batches, add_output, add_shards, job_process
from t5x.verbs.rank_eval import add_measures
from t5x.verbs.verb_parser import VerbParser


def define(parser: VerbParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True, help="a ranker: a checkpoint, or a MODEL_DIR")
    source = parser.add_argument_group("input, one of")
    source.add_argument("--run", metavar="FILE", help="a TREC or MS MARCO run, with the files below")
    source.add_argument("--candidates", metavar="FILE", help="JSON lists of queries with their passages")
    source.add_argument(
        "--input", metavar="FILE",
        help="pairs: JSON lines with query, text, query_id, doc_id, or tab-separated; - is standard input",
    )  # fmt: skip
    run = parser.add_argument_group("with --run")
    run.add_argument("--collection", metavar="FILE", help="id<TAB>passage, JSON lines, or a BEIR directory")
    run.add_argument("--topics", metavar="FILE", help="id<TAB>query, JSON lines, or a BEIR directory")
    run.add_argument("--skip_unknown", action="store_true", help="skip and count ids without a text")
    run.add_argument("--top", type=int, metavar="N", help="rerank the first N of a query; also --candidates")
    out = parser.add_argument_group("output")
    add_output(out, "the new run")
    out.add_argument("--format", choices=("trec", "msmarco", "jsonl"), help="jsonl: in input order, with logits")
    out.add_argument("--qrels", metavar="FILE", help="judgments: print measures before and after")
    add_measures(out)
    model = parser.add_argument_group("model")
    add_model(model)
    add_batches(model, "pairs", checkpoint_period=32)
    add_import(model)
    template = parser.add_topic("template", "inputs of the model (by default the checkpoint's)")
    template.add_argument(
        "--template", metavar="T", help="monot5, mt5, ptt5, monoptt5, or a text with {query} and {document}"
    )
    template.add_argument("--labels", metavar="A,B", help="the words for relevant and irrelevant: true,false")
    template.add_argument("--max_length", type=int, metavar="N", help="tokens per input; longer passages are cut (512)")
    template.add_argument(
        "--long_query", choices=("error", "truncate"), help="what to do if a query leaves no room for a passage (error)"
    )
    windows = parser.add_topic("windows", "long passages")
    windows.add_argument("--max_p", action="store_true", help="score a long passage by its best window")
    windows.add_argument("--window", type=int, metavar="N", help="words of a window (150)")
    windows.add_argument("--stride", type=int, metavar="N", help="words from one window to the next (75)")
    pairs = parser.add_topic("pairwise", "a second model that compares pairs of the top passages")
    pairs.add_argument("--pairwise", metavar="DIR", help="a duoT5 that compares pairs of the top passages")
    pairs.add_argument("--pairwise_top", type=int, metavar="K", help="number of passages to compare per query (50)")
    pairs.add_argument("--pairwise_labels", metavar="A,B", help="its words, if they are not true,false")
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


_OPTIONS = (
    "output", "template", "labels", "max_length", "long_query", "pairwise_top", "pairwise_labels",
    "batch_size", "checkpoint_period", "num_shards", "shard_id", "overwrite", "vocabulary", "dtype", "qrels",
    "measures", "relevance_level",
)  # fmt: skip
_NEEDS = {
    "max_p": ("window", "stride"),
    "pairwise": ("pairwise_top", "pairwise_labels"),
    "qrels": ("measures", "relevance_level"),
}


def run(args: argparse.Namespace) -> None:
    for needed, names in _NEEDS.items():
        if not getattr(args, needed) and (given := given_options(args, names)):
            raise UserError(f"{flags(given)} can only be used with --{needed}.")
    options = given_options(args, _OPTIONS)
    with job_process(args):
        from t5x.ranking.reranker import Windows
        from t5x.ranking.reranking import RerankInput, rerank

        if args.max_p:
            sizes = {"size": args.window, "stride": args.stride}
            options["windows"] = Windows(**{name: value for name, value in sizes.items() if value is not None})
        inputs = RerankInput(
            run=args.run, collection=args.collection, topics=args.topics, candidates=args.candidates, pairs=args.input,
            top=args.top, skip_unknown=args.skip_unknown,
        )  # fmt: skip
        if args.format is not None:
            options["form"] = args.format
        rerank(args.model, inputs, pairwise_dir=args.pairwise, **options)
