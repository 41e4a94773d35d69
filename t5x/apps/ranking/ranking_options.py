"""The options of `t5x rerank` and `t5x rank-eval`. Imports only what argparse needs, so that `--help` is fast."""

import dataclasses

from t5x._runtime.errors import UserError
from t5x.cli.options import BatchOptions, ModelOptions, OutputOptions, ShardOptions
from t5x.cli.parser import choice, flag, option


@dataclasses.dataclass(kw_only=True)
class MeasureOptions:
    """What rankings are scored with."""

    measures: tuple[str, ...] = option(
        "A,B",
        "ndcg@k, mrr@k, map@k, recall@k, precision@k (mrr@10,ndcg@10,recall@100,map)",
        ("mrr@10", "ndcg@10", "recall@100", "map"),
        type=lambda text: tuple(text.split(",")),
    )
    relevance_level: int = option("N", "lowest grade of a relevant passage (1)", 1)


@dataclasses.dataclass(kw_only=True)
class RankingInput:
    """What is ranked; one of these."""

    run: str | None = option("FILE", "a TREC or MS MARCO run, with the files below")
    candidates: str | None = option("FILE", "JSON lists of queries with their passages")
    input: str | None = option(
        "FILE", "pairs: JSON lines with query, text, query_id, doc_id, or tab-separated; - is standard input"
    )


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """The texts of a run."""

    collection: str | None = option("FILE", "id<TAB>passage, JSON lines, or a BEIR directory")
    topics: str | None = option("FILE", "id<TAB>query, JSON lines, or a BEIR directory")
    skip_unknown: bool = flag("skip and count ids without a text")
    top: int | None = option("N", "rerank the first N of a query; also --candidates")


@dataclasses.dataclass(kw_only=True)
class RankingOutput(OutputOptions):
    """Where the new ranking is written, and how it is judged."""

    format: str = choice(("trec", "msmarco", "jsonl"), "trec (default); jsonl: in input order, with logits", "trec")
    qrels: str | None = option("FILE", "judgments: print measures before and after")


@dataclasses.dataclass(kw_only=True)
class RankerOptions(BatchOptions, ModelOptions):
    """How the model is loaded and run."""

    checkpoint_period: int = option("N", "save results every N batches (32)", 32)


@dataclasses.dataclass(kw_only=True)
class TemplateOptions:
    """What the model reads, instead of the checkpoint's template."""

    template: str | None = option("T", "monot5, mt5, ptt5, monoptt5, or a text with {query} and {document}")
    labels: str | None = option("A,B", "the words for relevant and irrelevant: true,false")
    max_length: int | None = option("N", "tokens per input; longer passages are cut (512)")
    long_query: str = choice(
        ("error", "truncate"), "what to do if a query leaves no room for a passage (error)", "error"
    )


@dataclasses.dataclass(kw_only=True)
class WindowOptions:
    """How long passages are scored."""

    max_p: bool = flag("score a long passage by its best window")
    window: int = option("N", "words of a window (150)", 150)
    stride: int = option("N", "words from one window to the next (75)", 75)


@dataclasses.dataclass(kw_only=True)
class PairwiseOptions:
    """The second model."""

    pairwise: str | None = option("DIR", "a duoT5 that compares pairs of the top passages")
    pairwise_top: int = option("K", "number of passages to compare per query (50)", 50, type=int)
    pairwise_labels: str | None = option("A,B", "its words, if they are not true,false")


@dataclasses.dataclass(kw_only=True)
class RerankOptions(
    RankingInput,
    RunOptions,
    RankingOutput,
    MeasureOptions,
    RankerOptions,
    TemplateOptions,
    WindowOptions,
    PairwiseOptions,
    ShardOptions,
):
    """The options of `t5x rerank`."""

    model: str

    def __post_init__(self):
        if len(kinds := [f"--{flag}" for flag, path in self.inputs().items() if path is not None]) != 1:
            raise UserError(
                f"{' and '.join(kinds)} cannot be combined. Pass one of them." if kinds else
                "Nothing to rerank. Pass --run with --collection and --topics, --candidates, or --input."
            )  # fmt: skip
        if self.run is not None and self.collection is None:
            raise UserError("--run needs --collection, which contains the texts of its passages.")
        of_run = {"--collection": self.collection, "--topics": self.topics, "--skip_unknown": self.skip_unknown or None}
        if self.run is None and (unused := [flag for flag, value in of_run.items() if value is not None]):
            raise UserError(f"{', '.join(unused)} can only be used with --run; {kinds[0]} contains the texts.")
        if self.top is not None and (self.top < 1 or self.input is not None):
            raise UserError(
                f"--top is {self.top}: it must be at least 1." if self.input is None else
                "--top can only be used with --run and --candidates, whose passages are ranked."
            )  # fmt: skip
        if self.pairwise is not None and (self.pairwise_top < 2 or self.format == "jsonl"):
            raise UserError("--pairwise needs a --pairwise_top of at least 2, and --format trec or msmarco.")
        if self.qrels is not None and (self.num_shards > 1 or self.output == "-" or self.format == "jsonl"):
            raise UserError(
                "--qrels needs a whole run in a file: --output FILE, --format trec or msmarco, and no --num_shards "
                "(concatenate the shards, then use `t5x rank-eval`)."
            )

    def inputs(self) -> dict[str, str | None]:
        """Return {option: path} of the possible inputs."""
        return {"run": self.run, "candidates": self.candidates, "input": self.input}
