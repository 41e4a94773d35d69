"""`t5x rerank`: rank the passages of many queries from files to a file, resuming after interruptions."""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x.errors import UserError
from t5x.inference.loaded import BATCH_SIZE, load
from t5x.inference.output import Output
from t5x.inference.shown import Shown
from t5x.metrics.ranking import ranked
from t5x.partitioning import distributed
from t5x.ranking import evaluation, pairwise
from t5x.ranking.output_lines import FORMATS, ranking_lines
from t5x.ranking.pairs import ListWork, PairWork, RunWork, Unit, Work
from t5x.ranking.reranker import Encoded, Reranker, Windows, check_finite, scores
from t5x.ranking.trec_files import read_qrels

log = logging.getLogger(__name__)

BATCHES_A_CHUNK = 32
PAIRWISE_TOP = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """The input: one of `run` (with `collection` and `topics`), `candidates` and `pairs`.

    Attributes:
      run, collection, topics, top, skip_unknown: see `t5x.ranking.pairs.RunWork`.
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
                f"{' and '.join(flags)} exclude each other." if flags else
                "There is nothing to rerank: give --run with --collection and --topics, --candidates, or --input."
            )  # fmt: skip
        if self.run is not None and self.collection is None:
            raise UserError("--run needs --collection, where the texts of its passages are.")
        belong = {"--collection": self.collection, "--topics": self.topics, "--skip_unknown": self.skip_unknown or None}
        if self.run is None and (odd := [flag for flag, value in belong.items() if value is not None]):
            raise UserError(f"{', '.join(odd)} goes with --run; {flags[0]} has its texts itself.")
        if self.top is not None and (self.top < 1 or self.pairs is not None):
            raise UserError(
                f"--top is {self.top}: it must be at least 1." if self.pairs is None else
                "--top goes with --run and --candidates, whose passages are ranked; those of --input are not."
            )  # fmt: skip

    def read(self, form: str, check: Callable[[str, str], None]) -> Work:
        """Read the whole input for this output format.

        Args:
          check: see `PairWork`.
        """
        if self.run is not None:
            work = RunWork(self.run, self.collection, self.topics, self.top, skip_unknown=self.skip_unknown)
        elif self.candidates is not None:
            work = ListWork(self.candidates, self.top)
        else:
            return PairWork(self.pairs, by_query=form != "jsonl", check=check)
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
    given: Given,
    output: str = "-",
    *,
    form: str = "trec",
    template: str | None = None,
    labels: str | None = None,
    max_length: int | None = None,
    long_query: str = "error",
    windows: Windows | None = None,
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
    measures: Sequence[str] = evaluation.MEASURES,
    relevance_level: int = 1,
) -> None:
    """Score passages and write their ranking. A killed job resumes after its last finished chunk.

    Args:
      model_dir: a checkpoint or a MODEL_DIR.
      output: a file, or - for standard output.
      form: `trec`, `msmarco`, or `jsonl` (input order, with logits).
      template, labels, max_length, long_query, windows: see `Reranker`.
      pairwise_dir, pairwise_top: a duoT5 model that reorders this many top passages per query, also with `max_length`.
      pairwise_labels: labels of that model, instead of its template's.
      checkpoint_period: batches per chunk, approximately: a chunk ends with a query.
      num_shards, shard_id: number of shards and the index of this one. The output is `<output>-<shard>-of-<shards>`,
        and all shards concatenated are the complete result. Only `jsonl` of pairs splits queries.
      overwrite: replace an existing output.
      vocabulary, dtype: see `t5x.load`.
      qrels: judgments; the measures before and after reranking are printed.
      measures, relevance_level: see `t5x.metrics.ranking.per_query`.
    """
    counts = {"batch_size": batch_size, "checkpoint_period": checkpoint_period, "num_shards": num_shards}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}: with --num_shards {num_shards} it must be 0 to {num_shards - 1}.")
    if form not in FORMATS:
        raise UserError(f"--format is {form!r}: it must be one of {', '.join(FORMATS)}.")
    if pairwise_dir is not None and (pairwise_top < 2 or form == "jsonl"):
        raise UserError("--pairwise ranks: it takes --pairwise_top of 2 or more, and --format trec or msmarco.")
    if qrels is not None and (num_shards > 1 or output == "-" or form == "jsonl"):
        raise UserError(
            "--qrels needs a whole run in a file: --output FILE, --format trec or msmarco, and no --num_shards (join "
            "the parts, then `t5x rank-eval`)."
        )
    if given.pairs == "-" and (num_shards > 1 or jax.process_count() > 1):
        raise UserError("--input - can be read only once: several shards or processes need a file.")
    if num_shards > 1 and output != "-":
        output = f"{output}-{shard_id:05}-of-{num_shards:05}"
    with Output(output, overwrite=overwrite, inputs={**given.paths(), "qrels": qrels}) as to:
        judgments = None if qrels is None else read_qrels(qrels)
        ranker = Reranker(
            load(model_dir, vocabulary=vocabulary, dtype=dtype), template=template, labels=labels,
            max_length=max_length, batch_size=batch_size, long_query=long_query, windows=windows,
        )  # fmt: skip
        log.info("template: %s", ranker)
        second = None
        if pairwise_dir is not None:
            loaded = load(pairwise_dir, vocabulary=vocabulary, dtype=dtype)
            try:
                second = Reranker(
                    loaded, labels=pairwise_labels, max_length=max_length, batch_size=batch_size,
                    long_query=long_query, pairwise=True,
                )  # fmt: skip
            except UserError as error:
                raise UserError(str(error).replace("--labels", "--pairwise_labels")) from error
            log.info("pairwise: the first %d of each query; template: %s", pairwise_top, second)
        work = given.read(form, _check_of([ranker] if second is None else [ranker, second]))
        if judgments is not None and not judgments.keys() & work.query_ids:
            raise UserError(f"No query is judged in {qrels}: are its ids those of this input?")
        units = len(work.sizes)
        shard = range(units * shard_id // num_shards, units * (shard_id + 1) // num_shards)
        pairs = sum(work.sizes[shard.start : shard.stop])
        log.info("%d passage(s) of %d quer%s", pairs, work.num_queries, "y" if work.num_queries == 1 else "ies")
        if work.empty:
            log.warning("%d passage(s) have no text; they are scored as they are", work.empty)
        run = _Ranking(work, ranker, second, pairwise_top, form, batch_size, pairs)
        job = run.job() | counts | {"shard_id": shard_id, "vocabulary": vocabulary}
        _run(run, to, job, shard, checkpoint_period * batch_size)
    if judgments is not None and distributed.is_leader():
        runs = {} if work.before is None else {"before": work.before}
        print(evaluation.report(judgments, runs, {"after": output}, measures, relevance_level=relevance_level))


def _run(run: "_Ranking", output: Output, job: Mapping[str, Any], shard: range, size: int) -> None:
    """Compute the missing chunks and merge all."""
    finished = output.begin(job)
    counts = dict.fromkeys(("units", "pairs", "shown", "cut", "cut_queries"), 0)
    for record in finished:
        counts = {name: count + record[name] for name, count in counts.items()}
    total = run.total(shard)
    first = shard.start + counts["units"]
    parts = map(run.encode, _cut(run.work.units(first, shard.stop), size, run.inputs_of))
    with Shown(total, counts["shown"], "pair", "rerank", quiet=total <= run.batch_size) as shown:
        for part in _ahead(parts):
            lines, record = run.compute(part, shown)
            output.write(lines, record)
            counts = {name: count + record[name] for name, count in counts.items()}
    output.finish()
    if distributed.is_leader():
        limit = run.ranker.template.max_length
        if counts["cut"]:
            log.warning(
                "%d input(s) of %d passage(s) were longer than %d tokens and lost the end of their passage "
                "(--max_length, --max_p)", counts["cut"], counts["pairs"], limit,
            )  # fmt: skip
        if counts["cut_queries"]:
            log.warning("%d input(s) lost the end of their query too (--long_query truncate)", counts["cut_queries"])


class _Part(NamedTuple):
    """Units that are computed together, and their inputs."""

    units: list[Unit]
    encoded: Encoded


class _Ranking:
    """The computation of a part and its output lines."""

    def __init__(
        self,
        work: Work,
        ranker: Reranker,
        second: Reranker | None,
        second_top: int,
        form: str,
        batch_size: int,
        pairs: int,
    ):
        self.work = work
        self.ranker = ranker
        self.batch_size = batch_size
        self._second = second
        self._second_top = second_top
        self._form = form
        self._rows = ranker.loaded.rows(pairs, batch_size)

    def job(self) -> dict[str, Any]:
        """Return everything that the results depend on."""
        windows = self.ranker.windows
        made = {
            **_identity("model", self.ranker), "format": self._form, "input": self.work.digest,
            "windows": None if windows is None else dataclasses.asdict(windows),
        }  # fmt: skip
        if self._second is not None:
            made |= {**_identity("pairwise", self._second), "pairwise_top": self._second_top}
        return made

    def total(self, shard: range) -> int:
        """Return the number of pairs for the progress bar."""
        return sum(self._of_unit(size) for size in self.work.sizes[shard.start : shard.stop])

    def inputs_of(self, unit: Unit) -> int:
        """Return the number of inputs of a unit: its windows and comparisons."""
        windows = self.ranker.windows
        more = 0 if windows is None else sum(windows.count(text) - 1 for text in unit.texts)
        return self._of_unit(len(unit.doc_ids)) + more

    def encode(self, units: list[Unit]) -> _Part:
        return _Part(units, self.ranker.encode([(u.query, text) for u in units for text in u.texts]))

    def compute(self, part: _Part, shown: Shown) -> tuple[list[bytes], dict[str, int]]:
        """Return the output lines of the units and the record of their chunk."""
        units, encoded = part
        began = shown.done
        pairs, inputs = sum(len(unit.doc_ids) for unit in units), len(encoded.inputs)
        # Of a passage's windows the progress counts one.
        logits = self.ranker.logits(
            encoded, rows=self._rows, after_batch=lambda done: shown.update(began + done * pairs // inputs)
        )
        found = scores(logits)
        named, start = [], 0
        for unit in units:
            of_unit = slice(start, start + len(unit.doc_ids))
            _check_finite(unit.query_id, unit.doc_ids, logits[of_unit])
            named.append(
                (
                    dict(zip(unit.doc_ids, found[of_unit].tolist(), strict=True)),
                    dict(zip(unit.doc_ids, logits[of_unit].tolist(), strict=True)),
                )
            )
            start += len(unit.doc_ids)
        cut, cut_queries = encoded.cut, encoded.cut_queries
        if self._second is not None:
            more = self._compare(units, [of_unit for of_unit, _ in named], shown)
            cut, cut_queries = cut + more.cut, cut_queries + more.cut_queries
        lines = []
        for unit, (of_unit, of_labels) in zip(units, named, strict=True):
            lowest = min(of_unit.values(), default=0.0)
            behind = {doc: lowest - 1.0 - i for i, doc in enumerate(unit.rest)}
            lines += ranking_lines(self._form, unit.query_id, of_unit | behind, of_labels)
        record = {
            "units": len(units), "pairs": pairs, "shown": shown.done - began, "cut": cut, "cut_queries": cut_queries,
        }  # fmt: skip
        return lines, record

    def _compare(self, units: Sequence[Unit], of_units: Sequence[dict[str, float]], shown: Shown) -> Encoded:
        """Replace the top scores of each unit by those of pairwise comparisons, above all others."""
        first = [ranked(of_unit)[: self._second_top] for of_unit in of_units]
        asked = []
        for unit, chosen in zip(units, first, strict=True):
            texts = dict(zip(unit.doc_ids, unit.texts, strict=True))
            asked += pairwise.pairs_of(unit.query, [texts[doc] for doc in chosen])
        began = shown.done
        encoded = self._second.encode(asked)
        found = pairwise.wins(
            self._second, encoded, [len(chosen) for chosen in first], rows=self._rows,
            after_batch=lambda done: shown.update(began + done),
        )  # fmt: skip
        for unit, of_unit, chosen, of_chosen in zip(units, of_units, first, found, strict=True):
            _check_finite(unit.query_id, chosen, of_chosen[:, None])
            others = (score for doc, score in of_unit.items() if doc not in set(chosen))
            above = max([0.0, *others])
            of_unit.update({doc: above + float(score) for doc, score in zip(chosen, of_chosen, strict=True)})
        return encoded

    def _of_unit(self, size: int) -> int:
        several = 0 if self._second is None else min(size, self._second_top)
        return size + several * max(several - 1, 0)


def _identity(name: str, ranker: Reranker) -> dict[str, Any]:
    parts = {**ranker.loaded.identity(), "template": dataclasses.asdict(ranker.template)}
    return {name: parts.pop("model"), **{f"{name} {part}": value for part, value in parts.items()}}


def _check_of(rankers: Sequence[Reranker]) -> Callable[[str, str], None]:
    def check(query_id: str, query: str) -> None:
        for ranker in rankers:
            try:
                ranker.inputs.check(query)
            except UserError as error:
                raise UserError(f"Query {query_id!r}: {error}") from error

    return check


def _check_finite(query_id: str, doc_ids: Sequence[str], values: np.ndarray) -> None:
    check_finite(values, lambda i: f"Query {query_id!r}, document {doc_ids[i]!r}")


def _cut(units: Iterator[Unit], size: int, inputs_of: Callable[[Unit], int]) -> Iterator[list[Unit]]:
    """Group units until they have `size` inputs."""
    part, count = [], 0
    for unit in units:
        part.append(unit)
        count += inputs_of(unit)
        if count >= size:
            yield part
            part, count = [], 0
    if part:
        yield part


def _ahead(parts: Iterator[_Part]) -> Iterator[_Part]:
    """Yield the parts, preparing each while the previous one is computed."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part
