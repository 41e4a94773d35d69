"""`t5x rerank`: rank the passages of many queries from files to a file, resuming after interruptions."""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x._runtime.errors import UserError, located
from t5x.apps.ranking.ranking_files import evaluation_report, ranking_lines, read_qrels, read_run
from t5x.apps.ranking.ranking_options import RerankOptions
from t5x.apps.ranking.rerank_inputs import ListWork, PairWork, RankingUnit, RunWork, Work
from t5x.apps.ranking.reranker import EncodedPairs, PassageWindows, Reranker, check_finite, log_truncated, scores
from t5x.inference.jobs import JobProgress, Record, ResumableJob, Shard, check_counts, run_job
from t5x.inference.loaded import load
from t5x.inference.output import FileOutput, Output
from t5x.metrics.ranking import ranked
from t5x.partitioning import distributed

log = logging.getLogger(__name__)


def rerank(run: RerankOptions) -> None:
    """Score passages and write their ranking. A killed job resumes after its last finished chunk.

    A chunk has about `checkpoint_period` batches: it ends with a query. With `num_shards`, the output is
    `<output>-<shard>-of-<shards>`, and all shards concatenated are the complete result. Only `jsonl` of pairs splits
    queries.
    """
    check_counts(
        "--", batch_size=run.batch_size, checkpoint_period=run.checkpoint_period, num_shards=run.num_shards,
        shard_id=run.shard_id,
    )  # fmt: skip
    if run.input == "-" and (run.num_shards > 1 or jax.process_count() > 1):
        raise UserError("--input - can be read only once: several shards or processes need a file.")
    shard = Shard(run.shard_id, run.num_shards)
    output = shard.path(run.output)
    inputs = {**run.inputs(), "collection": run.collection, "topics": run.topics, "qrels": run.qrels}
    to = FileOutput(output, overwrite=run.overwrite, inputs=inputs)
    judgments = None if run.qrels is None else read_qrels(run.qrels)
    windows = PassageWindows(run.window, run.stride) if run.max_p else None
    limits: dict[str, Any] = {
        "max_length": run.max_length, "long_query": run.long_query, "batch_size": run.batch_size,
    }  # fmt: skip
    loaded = load(run.model, vocabulary=run.vocabulary, dtype=run.dtype)
    ranker = Reranker(loaded, template=run.template, labels=run.labels, windows=windows, **limits)
    log.info("template: %s", ranker)
    second = None
    if run.pairwise is not None:
        loaded = load(run.pairwise, vocabulary=run.vocabulary, dtype=run.dtype)
        try:
            second = Reranker(loaded, labels=run.pairwise_labels, pairwise=True, **limits)
        except UserError as error:
            raise UserError(str(error).replace("--labels", "--pairwise_labels")) from error
        log.info("pairwise: the first %d of each query; template: %s", run.pairwise_top, second)
    work = _read_work(run, _check_of([ranker] if second is None else [ranker, second]))
    if judgments is not None and not judgments.keys() & work.query_ids:
        raise UserError(f"No query of the input is judged in {run.qrels}. Check that both use the same query ids.")
    job = _Reranking(work=work, units=shard.range(len(work.sizes)), ranker=ranker, second=second, run=run)
    log.info("%d passage(s) of %d quer%s", job.num_pairs, work.num_queries, "y" if work.num_queries == 1 else "ies")
    if work.empty:
        log.warning("%d passage(s) have no text; they are scored without it", work.empty)
    records = run_job(job, to)
    if distributed.is_leader():
        cut, cut_queries, pairs = (sum(record[name] for record in records) for name in ("cut", "cut_queries", "pairs"))
        log_truncated(cut, cut_queries, pairs, ranker.template.max_length, "--max_length, --max_p")
        if judgments is not None:
            runs = ({} if work.before is None else {"before": work.before}) | {"after": read_run(output)}
            print(evaluation_report(judgments, runs, run.measures, relevance_level=run.relevance_level))


def _read_work(run: RerankOptions, check: Callable[[str, str], None]) -> Work:
    """Read the whole input.

    Args:
      check: see `PairWork`.
    """
    if run.input is not None:
        return PairWork(run.input, by_query=run.format != "jsonl", check=check)
    work: RunWork | ListWork
    if run.candidates is not None:
        work = ListWork(run.candidates, run.top)
    else:
        assert run.run is not None and run.collection is not None
        work = RunWork(run.run, run.collection, run.topics, run.top, skip_unknown=run.skip_unknown)
    for query_id, query in work.queries.items():
        check(query_id, query)
    return work


class _Chunk(NamedTuple):
    """Units that are computed together, and their inputs."""

    units: list[RankingUnit]
    encoded: EncodedPairs


@dataclasses.dataclass(kw_only=True)
class _Reranking(ResumableJob):
    """Scores units and writes their rankings.

    Args:
      units: indices of the units to score.
      second: a pairwise ranker for the first `pairwise_top` passages of each query.
    """

    description: str = "rerank"
    unit: str = "pair"
    counted: str = "shown"
    work: Work
    units: range
    ranker: Reranker
    second: Reranker | None
    run: RerankOptions

    def __post_init__(self):
        sizes = self.work.sizes[self.units.start : self.units.stop]
        self.num_pairs = sum(sizes)
        self.total = sum(map(self._comparisons, sizes))
        self.quiet_up_to = self.run.batch_size
        self._rows = self.ranker.loaded.rows(self.num_pairs, self.run.batch_size)

    def identity(self) -> dict[str, Any]:
        run, windows = self.run, self.ranker.windows
        parts = {
            **_identity("model", self.ranker), "format": run.format, "input": self.work.digest,
            "windows": None if windows is None else dataclasses.asdict(windows), "batch_size": run.batch_size,
            "checkpoint_period": run.checkpoint_period, "num_shards": run.num_shards, "shard_id": run.shard_id,
            "vocabulary": run.vocabulary,
        }  # fmt: skip
        if self.second is not None:
            parts |= {**_identity("pairwise", self.second), "pairwise_top": run.pairwise_top}
        return parts

    def resume(self, finished: Sequence[Record], output: Output) -> tuple[list[Record], Iterator["_Chunk"]]:
        first = self.units.start + sum(record["units"] for record in finished)
        size = self.run.checkpoint_period * self.run.batch_size
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
        lines: list[bytes] = []
        for unit, of_unit, of_labels in zip(units, scores_of, logits_of, strict=True):
            lowest = min(of_unit.values(), default=0.0)
            unscored = {doc: lowest - 1.0 - i for i, doc in enumerate(unit.unscored)}
            lines += ranking_lines(self.run.format, unit.query_id, of_unit | unscored, of_labels)
        record = {
            "units": len(units), "pairs": pairs, "shown": progress.done - before, "cut": cut,
            "cut_queries": cut_queries,
        }  # fmt: skip
        return lines, record

    def _compare(
        self, second: Reranker, units: Sequence[RankingUnit], scores_of: list[dict[str, float]], progress: JobProgress
    ) -> EncodedPairs:
        """Replace the top scores of each unit by those of pairwise comparisons, above all others."""
        first = [ranked(of_unit)[: self.run.pairwise_top] for of_unit in scores_of]
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
        compared = 0 if self.second is None else min(size, self.run.pairwise_top)
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
