"""`t5x rerank`: rank the passages of many queries from files to a file, resuming after interruptions."""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x._runtime.errors import UserError, located
from t5x.apps.ranking import trec_files
from t5x.apps.ranking.rerank_inputs import ListWork, PairWork, RankingUnit, RunWork, Work
from t5x.apps.ranking.reranker import EncodedPairs, Reranker, check_finite, log_truncated, scores
from t5x.apps.ranking.trec_files import FORMATS, ranking_lines, read_qrels, read_run
from t5x.inference.jobs import JobProgress, Record, ResumableJob, Shard, check_counts, run_job
from t5x.inference.loaded import BATCH_SIZE, load
from t5x.inference.output import FileOutput, Output
from t5x.metrics.ranking import ranked
from t5x.partitioning import distributed

log = logging.getLogger(__name__)

BATCHES_A_CHUNK = 32
PAIRWISE_TOP = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankInput:
    """The input: one of `run` (with `collection` and `topics`), `candidates` and `pairs`.

    Attributes:
      run, collection, topics, top, skip_unknown: see `t5x.apps.ranking.rerank_inputs.RunWork`.
      candidates: see `ListWork`.
      pairs: see `PairWork`.
    """

    run: str | None = None
    collection: str | None = None
    topics: str | None = None
    candidates: str | None = None
    pairs: str | None = None
    top: int | None = None
    skip_unknown: bool = False

    def __post_init__(self):
        flags = [f"--{flag}" for flag, value in self._kinds().items() if value is not None]
        if len(flags) != 1:
            raise UserError(
                f"{' and '.join(flags)} cannot be combined. Pass one of them." if flags else
                "Nothing to rerank. Pass --run with --collection and --topics, --candidates, or --input."
            )  # fmt: skip
        if self.run is not None and self.collection is None:
            raise UserError("--run needs --collection, which contains the texts of its passages.")
        of_run = {"--collection": self.collection, "--topics": self.topics, "--skip_unknown": self.skip_unknown or None}
        if self.run is None and (unused := [flag for flag, value in of_run.items() if value is not None]):
            raise UserError(f"{', '.join(unused)} can only be used with --run; {flags[0]} contains the texts.")
        if self.top is not None and (self.top < 1 or self.pairs is not None):
            raise UserError(
                f"--top is {self.top}: it must be at least 1." if self.pairs is None else
                "--top can only be used with --run and --candidates, whose passages are ranked."
            )  # fmt: skip

    def read(self, form: str, check: Callable[[str, str], None]) -> Work:
        """Read the whole input for this output format.

        Args:
          check: see `PairWork`.
        """
        if self.pairs is not None:
            return PairWork(self.pairs, by_query=form != "jsonl", check=check)
        work: RunWork | ListWork
        if self.candidates is not None:
            work = ListWork(self.candidates, self.top)
        else:
            assert self.run is not None and self.collection is not None
            work = RunWork(self.run, self.collection, self.topics, self.top, skip_unknown=self.skip_unknown)
        for query_id, query in work.queries.items():
            check(query_id, query)
        return work

    def paths(self) -> dict[str, str | None]:
        """Return {flag: path} of the input files."""
        return {**self._kinds(), "collection": self.collection, "topics": self.topics}

    def _kinds(self) -> dict[str, str | None]:
        return {"run": self.run, "candidates": self.candidates, "input": self.pairs}


def rerank(
    model_dir: str,
    inputs: RerankInput,
    output: str = "-",
    *,
    form: str = "trec",
    pairwise_dir: str | None = None,
    pairwise_top: int = PAIRWISE_TOP,
    pairwise_labels: str | None = None,
    batch_size: int = BATCH_SIZE,
    checkpoint_period: int = BATCHES_A_CHUNK,
    num_shards: int = 1,
    shard_id: int = 0,
    overwrite: bool = False,
    vocabulary: str | None = None,
    dtype: str | None = None,
    qrels: str | None = None,
    measures: Sequence[str] = trec_files.MEASURES,
    relevance_level: int = 1,
    **ranking: Any,
) -> None:
    """Score passages and write their ranking. A killed job resumes after its last finished chunk.

    Args:
      model_dir: a checkpoint or a MODEL_DIR.
      inputs: what to rank.
      output: a file, or - for standard output.
      form: `trec`, `msmarco`, or `jsonl` (input order, with logits).
      pairwise_dir, pairwise_top: a duoT5 model that reorders this many top passages per query, also with `max_length`.
      pairwise_labels: labels of that model, instead of its template's.
      checkpoint_period: batches per chunk, approximately: a chunk ends with a query.
      num_shards, shard_id: number of shards and the index of this one. The output is `<output>-<shard>-of-<shards>`,
        and all shards concatenated are the complete result. Only `jsonl` of pairs splits queries.
      overwrite: replace an existing output.
      vocabulary, dtype: see `t5x.load`.
      qrels: judgments; the measures before and after reranking are printed.
      measures, relevance_level: see `t5x.metrics.ranking.per_query`.
      ranking: `template`, `labels`, `max_length`, `long_query` and `windows` of the model: see `Reranker`.
    """
    counts = {"batch_size": batch_size, "checkpoint_period": checkpoint_period, "num_shards": num_shards}
    check_counts("--", shard_id=shard_id, **counts)
    if form not in FORMATS:
        raise UserError(f"--format is {form!r}: it must be one of {', '.join(FORMATS)}.")
    if pairwise_dir is not None and (pairwise_top < 2 or form == "jsonl"):
        raise UserError("--pairwise needs a --pairwise_top of at least 2, and --format trec or msmarco.")
    if qrels is not None and (num_shards > 1 or output == "-" or form == "jsonl"):
        raise UserError(
            "--qrels needs a whole run in a file: --output FILE, --format trec or msmarco, and no --num_shards "
            "(concatenate the shards, then use `t5x rank-eval`)."
        )
    if inputs.pairs == "-" and (num_shards > 1 or jax.process_count() > 1):
        raise UserError("--input - can be read only once: several shards or processes need a file.")
    shard = Shard(shard_id, num_shards)
    output = shard.path(output)
    to = FileOutput(output, overwrite=overwrite, inputs={**inputs.paths(), "qrels": qrels})
    judgments = None if qrels is None else read_qrels(qrels)
    ranker = Reranker(load(model_dir, vocabulary=vocabulary, dtype=dtype), batch_size=batch_size, **ranking)
    log.info("template: %s", ranker)
    second = None
    if pairwise_dir is not None:
        loaded = load(pairwise_dir, vocabulary=vocabulary, dtype=dtype)
        try:
            common = {name: ranking[name] for name in ("max_length", "long_query") if name in ranking}
            second = Reranker(loaded, labels=pairwise_labels, batch_size=batch_size, pairwise=True, **common)
        except UserError as error:
            raise UserError(str(error).replace("--labels", "--pairwise_labels")) from error
        log.info("pairwise: the first %d of each query; template: %s", pairwise_top, second)
    work = inputs.read(form, _check_of([ranker] if second is None else [ranker, second]))
    if judgments is not None and not judgments.keys() & work.query_ids:
        raise UserError(f"No query of the input is judged in {qrels}. Check that both use the same query ids.")
    job = _Reranking(
        work=work, units=shard.range(len(work.sizes)), ranker=ranker, second=second, second_top=pairwise_top, form=form,
        source={**counts, "shard_id": shard_id, "vocabulary": vocabulary},
    )  # fmt: skip
    log.info("%d passage(s) of %d quer%s", job.num_pairs, work.num_queries, "y" if work.num_queries == 1 else "ies")
    if work.empty:
        log.warning("%d passage(s) have no text; they are scored without it", work.empty)
    records = run_job(job, to)
    if distributed.is_leader():
        cut, cut_queries, pairs = (sum(record[name] for record in records) for name in ("cut", "cut_queries", "pairs"))
        log_truncated(cut, cut_queries, pairs, ranker.template.max_length, "--max_length, --max_p")
        if judgments is not None:
            runs = ({} if work.before is None else {"before": work.before}) | {"after": read_run(output)}
            print(trec_files.evaluation_report(judgments, runs, measures, relevance_level=relevance_level))


class _Chunk(NamedTuple):
    """Units that are computed together, and their inputs."""

    units: list[RankingUnit]
    encoded: EncodedPairs


@dataclasses.dataclass(kw_only=True)
class _Reranking(ResumableJob):
    """Scores units and writes their rankings.

    Args:
      units: indices of the units to score.
      second: a pairwise ranker for the first `second_top` passages of each query.
      source: further options that the results depend on: `batch_size`, `checkpoint_period`, in batches, and others.
    """

    description: str = "rerank"
    unit: str = "pair"
    counted: str = "shown"
    work: Work
    units: range
    ranker: Reranker
    second: Reranker | None
    second_top: int
    form: str
    source: dict[str, Any]

    def __post_init__(self):
        sizes = self.work.sizes[self.units.start : self.units.stop]
        self.num_pairs = sum(sizes)
        self.total = sum(map(self._comparisons, sizes))
        self.quiet_up_to = self.source["batch_size"]
        self._rows = self.ranker.loaded.rows(self.num_pairs, self.source["batch_size"])

    def identity(self) -> dict[str, Any]:
        windows = self.ranker.windows
        parts = {
            **_identity("model", self.ranker), "format": self.form, "input": self.work.digest,
            "windows": None if windows is None else dataclasses.asdict(windows),
        }  # fmt: skip
        if self.second is not None:
            parts |= {**_identity("pairwise", self.second), "pairwise_top": self.second_top}
        return {**parts, **self.source}

    def resume(self, finished: Sequence[Record], output: Output) -> tuple[list[Record], Iterator["_Chunk"]]:
        first = self.units.start + sum(record["units"] for record in finished)
        size = self.source["checkpoint_period"] * self.source["batch_size"]
        units = _group(self.work.units(first, self.units.stop), size, self.inputs_of)
        return list(finished), _prefetch(map(self._encode, units))

    def inputs_of(self, unit: RankingUnit) -> int:
        """Return the number of inputs of a unit: its windows and comparisons."""
        windows = self.ranker.windows
        more = 0 if windows is None else sum(len(windows.of(text)) - 1 for text in unit.texts)
        return self._comparisons(len(unit.doc_ids)) + more

    def _encode(self, units: list[RankingUnit]) -> _Chunk:
        return _Chunk(units, self.ranker.encode([(u.query, text) for u in units for text in u.texts]))

    def compute(self, chunk: _Chunk, progress: JobProgress) -> tuple[list[bytes], Record]:
        units, encoded = chunk
        before, pairs = progress.done, sum(len(unit.doc_ids) for unit in units)
        # The progress counts the windows of a passage as one.
        after_batch = progress.after_batch(pairs, len(encoded.inputs))
        logits = self.ranker.logits(encoded, rows=self._rows, after_batch=after_batch)
        _check_finite([(unit.query_id, doc) for unit in units for doc in unit.doc_ids], logits)
        values, rows = iter(scores(logits).tolist()), iter(logits.tolist())
        scores_of = [{doc: next(values) for doc in unit.doc_ids} for unit in units]
        logits_of = [{doc: next(rows) for doc in unit.doc_ids} for unit in units]
        cut, cut_queries = encoded.cut, encoded.cut_queries
        if self.second is not None:
            compared = self._compare(self.second, units, scores_of, progress)
            cut, cut_queries = cut + compared.cut, cut_queries + compared.cut_queries
        lines = []
        for unit, of_unit, of_labels in zip(units, scores_of, logits_of, strict=True):
            lowest = min(of_unit.values(), default=0.0)
            unscored = {doc: lowest - 1.0 - i for i, doc in enumerate(unit.unscored)}
            lines += ranking_lines(self.form, unit.query_id, of_unit | unscored, of_labels)
        record = {
            "units": len(units), "pairs": pairs, "shown": progress.done - before, "cut": cut,
            "cut_queries": cut_queries,
        }  # fmt: skip
        return lines, record

    def _compare(
        self, second: Reranker, units: Sequence[RankingUnit], scores_of: list[dict[str, float]], progress: JobProgress
    ) -> EncodedPairs:
        """Replace the top scores of each unit by those of pairwise comparisons, above all others."""
        first = [ranked(of_unit)[: self.second_top] for of_unit in scores_of]
        pairs = []
        for unit, chosen in zip(units, first, strict=True):
            texts = dict(zip(unit.doc_ids, unit.texts, strict=True))
            pairs += pairs_of(unit.query, [texts[doc] for doc in chosen])
        encoded = second.encode(pairs)
        logits = second.logits(encoded, rows=self._rows, after_batch=progress.after_batch())
        won = wins(logits, [len(chosen) for chosen in first])
        names = [(unit.query_id, doc) for unit, chosen in zip(units, first, strict=True) for doc in chosen]
        _check_finite(names, np.concatenate(won)[:, None])
        for of_unit, chosen, of_chosen in zip(scores_of, first, won, strict=True):
            others = (score for doc, score in of_unit.items() if doc not in set(chosen))
            above = max([0.0, *others])
            of_unit.update({doc: above + float(score) for doc, score in zip(chosen, of_chosen, strict=True)})
        return encoded

    def _comparisons(self, size: int) -> int:
        compared = 0 if self.second is None else min(size, self.second_top)
        return size + compared * max(compared - 1, 0)


def _identity(name: str, ranker: Reranker) -> dict[str, Any]:
    parts = {**ranker.loaded.identity(), "template": dataclasses.asdict(ranker.template)}
    return {name: parts.pop("model"), **{f"{name} {part}": value for part, value in parts.items()}}


def _check_of(rankers: Sequence[Reranker]) -> Callable[[str, str], None]:
    def check(query_id: str, query: str) -> None:
        with located(f"Query {query_id!r}"):
            for ranker in rankers:
                ranker.inputs.check(query)

    return check


def _check_finite(names: Sequence[tuple[str, str]], values: np.ndarray) -> None:
    """Raise a UserError with the query and document of the first row that is not finite."""
    check_finite(values, lambda i: f"Query {names[i][0]!r}, document {names[i][1]!r}")


def _group(
    units: Iterator[RankingUnit], size: int, inputs_of: Callable[[RankingUnit], int]
) -> Iterator[list[RankingUnit]]:
    """Group units until they have `size` inputs."""
    group, count = [], 0
    for unit in units:
        group.append(unit)
        count += inputs_of(unit)
        if count >= size:
            yield group
            group, count = [], 0
    if group:
        yield group


def _prefetch(chunks: Iterator[_Chunk]) -> Iterator[_Chunk]:
    """Yield the chunks, preparing each while the previous one is computed."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, chunks, None)
        while (chunk := upcoming.result()) is not None:
            upcoming = pool.submit(next, chunks, None)
            yield chunk


# --- duoT5: the top passages of a query are compared pairwise and ordered by their wins -------------------------------


def pairs_of(query: str, documents: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (query, document i, document j) for all i != j, ordered by i: k (k - 1) triples for k documents."""
    return [(query, a, b) for i, a in enumerate(documents) for j, b in enumerate(documents) if i != j]


def wins(logits: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Return the scores of each query's documents; NaN if a logit is not finite.

    Args:
      logits: of the `pairs_of` of all queries, concatenated.
      counts: number of documents per query.
    """
    # An infinite logit would be a plain 0 or 1 here.
    probabilities = np.where(np.isfinite(logits).all(axis=1), np.exp(scores(logits)), np.nan)
    sums, start = [], 0
    for count in counts:
        end = start + count * (count - 1)
        preferences = np.zeros((count, count))
        preferences[~np.eye(count, dtype=bool)] = probabilities[start:end]
        sums.append(symmetric_sum(preferences))
        start = end
    return sums


def symmetric_sum(preferences: np.ndarray) -> np.ndarray:
    """Return SYM-SUM: for each document i, the sum over the other documents j of p_ij + (1 - p_ji).

    Args:
      preferences: [k, k]; p_ij is the probability that i is more relevant than j. The diagonal is ignored.
    """
    others = ~np.eye(len(preferences), dtype=bool)
    return np.where(others, preferences + 1.0 - preferences.T, 0.0).sum(axis=1)
