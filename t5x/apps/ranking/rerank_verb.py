"""`t5x rerank`: its arguments and the call of its entry point."""

import argparse
import dataclasses

from t5x._runtime.errors import UserError
from t5x.apps.ranking.rank_eval_verb import MeasureOptions
from t5x.cli.options import (
    JOB_OPTIONS,
    SHARD_OPTIONS,
    add_batches,
    add_import,
    add_model,
    add_output,
    add_processes,
    add_shards,
    flags,
    given_options,
    job_process,
)
from t5x.cli.parser import VerbParser, add_options, choice, option, passed_options


@dataclasses.dataclass(kw_only=True)
class TemplateOptions:
    """What the model reads, instead of the checkpoint's template."""

    template: str | None = option("T", "monot5, mt5, ptt5, monoptt5, or a text with {query} and {document}")
    labels: str | None = option("A,B", "the words for relevant and irrelevant: true,false")
    max_length: int | None = option("N", "tokens per input; longer passages are cut (512)")
    long_query: str | None = choice(("error", "truncate"), "what to do if a query leaves no room for a passage (error)")


@dataclasses.dataclass(kw_only=True)
class WindowOptions:
    """How --max_p divides passages."""

    window: int | None = option("N", "words of a window (150)")
    stride: int | None = option("N", "words from one window to the next (75)")


@dataclasses.dataclass(kw_only=True)
class PairwiseOptions:
    """What the model of --pairwise compares."""

    pairwise_top: int | None = option("K", "number of passages to compare per query (50)", type=int)
    pairwise_labels: str | None = option("A,B", "its words, if they are not true,false")


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
    add_options(out, MeasureOptions)
    model = parser.add_argument_group("model")
    add_model(model)
    add_batches(model, "pairs", checkpoint_period=32)
    add_import(model)
    add_options(parser.add_topic("template", "inputs of the model (by default the checkpoint's)"), TemplateOptions)
    windows = parser.add_topic("windows", "long passages")
    windows.add_argument("--max_p", action="store_true", help="score a long passage by its best window")
    add_options(windows, WindowOptions)
    pairs = parser.add_topic("pairwise", "a second model that compares pairs of the top passages")
    pairs.add_argument("--pairwise", metavar="DIR", help="a duoT5 that compares pairs of the top passages")
    add_options(pairs, PairwiseOptions)
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


_NEEDS = {"max_p": WindowOptions, "pairwise": PairwiseOptions, "qrels": MeasureOptions}


def run(args: argparse.Namespace) -> None:
    for needed, kind in _NEEDS.items():
        if not getattr(args, needed) and (unused := passed_options(args, kind)):
            raise UserError(f"{flags(unused)} can only be used with --{needed}.")
    options = given_options(args, (*JOB_OPTIONS, *SHARD_OPTIONS, "vocabulary", "dtype", "qrels"))
    options |= passed_options(args, TemplateOptions, PairwiseOptions, MeasureOptions)
    with job_process(args):
        from t5x.apps.ranking.rerank_job import RerankInput, rerank
        from t5x.apps.ranking.reranker import PassageWindows

        if args.max_p:
            sizes = {"size": args.window, "stride": args.stride}
            options["windows"] = PassageWindows(**{name: value for name, value in sizes.items() if value is not None})
        inputs = RerankInput(
            run=args.run, collection=args.collection, topics=args.topics, candidates=args.candidates, pairs=args.input,
            top=args.top, skip_unknown=args.skip_unknown,
        )  # fmt: skip
        if args.format is not None:
            options["form"] = args.format
        rerank(args.model, inputs, pairwise_dir=args.pairwise, **options)
