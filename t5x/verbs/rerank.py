"""`t5x rerank`: its arguments and the call of its entry point."""

import argparse
import signal
import textwrap
from typing import Any

from t5x.errors import UserError
from t5x.verbs.arguments import (
    add_import,
    add_model,
    add_processes,
    import_modules,
    leave_in_order,
    processes,
    work_begins,
)
from t5x.verbs.rank_eval import add_measures


def define(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True, help="a ranker: a checkpoint, or a MODEL_DIR")
    what = parser.add_argument_group("what is reranked, one of")
    what.add_argument("--run", metavar="FILE", help="a run, TREC's or MS MARCO's; needs --collection and --topics")
    what.add_argument("--candidates", metavar="FILE", help="JSON lists of queries with their passages")
    what.add_argument(
        "--input", metavar="FILE",
        help="pairs: JSON lines with query, text, query_id, doc_id, or tab-separated; - is standard input",
    )  # fmt: skip
    run = parser.add_argument_group("with --run (and --top with --candidates)")
    run.add_argument("--collection", metavar="FILE", help="passages: id<TAB>text, or JSON lines; or a BEIR directory")
    run.add_argument("--topics", metavar="FILE", help="queries: id<TAB>query, or JSON lines; or a BEIR directory")
    run.add_argument(
        "--skip_unknown", action="store_true", help="leave out ids whose text is not there, and count them"
    )
    run.add_argument(
        "--top", type=int, metavar="N", help="rerank the first N of each query; the rest stays behind them"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--output", metavar="FILE", help="the new run; - is standard output (default)")
    out.add_argument("--format", choices=("trec", "msmarco", "jsonl"), help="jsonl: in the input's order, with logits")
    out.add_argument("--overwrite", action="store_true", default=None, help="replace an output file that exists")
    out.add_argument("--qrels", metavar="FILE", help="judgments: print measures before and after")
    add_measures(out)
    model = parser.add_argument_group("how the model reads", "found from the checkpoint where it is known")
    model.add_argument(
        "--template", metavar="T", help="monot5, mt5, ptt5, monoptt5, or a text with {query} and {document}"
    )
    model.add_argument("--labels", metavar="A,B", help="the words that say relevant and not: true,false")
    model.add_argument("--max_length", type=int, metavar="N", help="tokens of an input; longer passages are cut (512)")
    model.add_argument("--long_query", choices=("error", "truncate"), help="that leaves a passage no room (error)")
    model.add_argument("--max_p", action="store_true", help="score a long passage by its best window")
    model.add_argument("--window", type=int, metavar="N", help="words of a window (150)")
    model.add_argument("--stride", type=int, metavar="N", help="words from one window to the next (75)")
    model.add_argument("--pairwise", metavar="DIR", help="a duoT5 that compares the first passages two by two")
    model.add_argument("--pairwise_top", type=int, metavar="K", help="how many of each query (50)")
    model.add_argument("--pairwise_labels", metavar="A,B", help="its words, where they are not true,false")
    add_model(model)
    model.add_argument("--batch_size", type=int, metavar="N", help="pairs computed together (32)")
    model.add_argument("--checkpoint_period", type=int, metavar="N", help="batches after which results are kept (32)")
    shards = parser.add_argument_group("parts of the input, each by a program of its own")
    shards.add_argument("--num_shards", type=int, metavar="N", help="how many (1)")
    shards.add_argument("--shard_id", type=int, metavar="I", help="which of them this one does, from 0")
    add_import(parser)
    add_processes(parser)
    parser.description = "Order passages by how relevant a model says they are. Stopped and started again, it goes on."
    parser.epilog = "examples:\n" + textwrap.indent(textwrap.dedent(_EXAMPLES).strip(), "  ")


_EXAMPLES = """
t5x rerank --model castorini/monot5-base-msmarco --run bm25.trec --collection collection.tsv --topics topics.tsv \\
    --output monot5.trec --qrels qrels.txt
t5x rerank --model DIR --candidates bm25_top100.json.gz --top 50 --output run.trec
t5x rerank --model DIR --run bm25.trec --collection beir/scifact --output run.trec --pairwise DUO --pairwise_top 20
printf 'what is a quark?\\tA quark is a particle.\\n' | t5x rerank --model DIR --input - --format jsonl
"""

_OPTIONS = (
    "output", "template", "labels", "max_length", "long_query", "pairwise_top", "pairwise_labels",
    "batch_size", "checkpoint_period", "num_shards", "shard_id", "overwrite", "vocabulary", "dtype", "qrels",
    "measures", "relevance_level",
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    given: dict[str, Any] = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    for needed, names in {"max_p": ("window", "stride"), "pairwise": ("pairwise_top", "pairwise_labels")}.items():
        if not getattr(args, needed) and (odd := [n for n in names if getattr(args, n) is not None]):
            raise UserError(f"--{', --'.join(odd)} goes with --{needed}.")
    if args.qrels is None and (odd := [n for n in ("measures", "relevance_level") if n in given]):
        raise UserError(f"--{', --'.join(odd)} goes with --qrels.")
    import_modules(args)  # they may define classes, such as a vocabulary
    work_begins()
    signal.signal(signal.SIGTERM, leave_in_order)
    with processes(args):
        from t5x.ranking.reranker import Windows
        from t5x.ranking.reranking import Given, rerank

        if args.max_p:
            sizes = {"size": args.window, "stride": args.stride}
            given["windows"] = Windows(**{name: value for name, value in sizes.items() if value is not None})
        what = Given(
            run=args.run, collection=args.collection, topics=args.topics, candidates=args.candidates, pairs=args.input,
            top=args.top, skip_unknown=args.skip_unknown,
        )  # fmt: skip
        if args.format is not None:
            given["form"] = args.format
        rerank(args.model, what, pairwise_dir=args.pairwise, **given)
