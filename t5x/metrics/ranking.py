"""Measures of ranked documents, from 0 to 1, with the conventions of trec_eval.

    qrels = {"q1": {"d1": 3, "d7": 0}}     {query: {document: grade}}
    run = {"q1": {"d1": 9.5, "d2": 9.1}}   {query: {document: score}}

- Documents are ordered by score (float64), regardless of the ranks in a file; ties by descending document id.
- A document without a judgment, or with a negative grade, is not relevant. `relevance_level` is the lowest grade of a
  relevant document: trec_eval's -l; 2 is usual for TREC Deep Learning passages. nDCG uses the grade as gain.
- Queries of the run without judgments are ignored. A query without relevant documents counts as 0.
- Queries with judgments that are not in the run are ignored too, with a warning; `missing_as_zero` counts them as 0:
  trec_eval's -c. Use it to compare systems.

    >>> evaluate({"q": {"a": 1, "b": 2}}, {"q": {"a": 0.9, "b": 0.8, "c": 0.7}}, ["mrr@10", "precision@3"])
    {'mrr@10': 1.0, 'precision@3': 0.6666666666666666}
"""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.metrics.checks import check_pairs, numbers

logger = logging.getLogger(__name__)

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]
PerQuery = dict[str, dict[str, float]]

MEASURES = ("ndcg@10", "mrr@10", "recall@100", "map")


def evaluate(qrels: Qrels, run: Run, measures: Sequence[str] = MEASURES, **options: Any) -> dict[str, float]:
    """Return {measure: mean over the queries}. The arguments are those of `per_query`."""
    results = per_query(qrels, run, measures, **options)
    return {measure: float(np.mean(list(values.values()))) for measure, values in results.items()}


def per_query(
    qrels: Qrels,
    run: Run,
    measures: Sequence[str] = MEASURES,
    *,
    relevance_level: int = 1,
    missing_as_zero: bool = False,
) -> PerQuery:
    """Return {measure: {query: value}}, with queries in the order of `qrels`.

    Args:
      qrels: judgments.
      run: scores.
      measures: "ndcg@k", "mrr@k", "map@k" (these also without "@k", for the whole ranking), "recall@k" and
        "precision@k".
      relevance_level: lowest grade of a relevant document; ignored by nDCG.
      missing_as_zero: count queries with judgments that are not in the run as 0.

    Raises:
      UserError: if a measure is unknown, or `qrels` and `run` are invalid or have no query in common.
    """
    if relevance_level < 1:
        raise UserError(f"relevance_level={relevance_level}: it must be at least 1, because grade 0 is not relevant.")
    parsed = {measure: _parse_measure(measure) for measure in measures}
    values: PerQuery = {measure: {} for measure in parsed}
    for query in _queries(qrels, run, missing_as_zero):
        judged = qrels[query]
        _check_values("grade", query, judged)
        order = ranked(run.get(query, {}), query)
        grades = np.array([max(judged.get(document, 0), 0) for document in order], np.float64)
        ideal = np.sort([grade for grade in judged.values() if grade > 0])[::-1].astype(np.float64)
        for measure, (name, cutoff) in parsed.items():
            values[measure][query] = _value(name, grades[:cutoff], ideal, relevance_level, cutoff)
    return values


def ranked(scores: Mapping[str, float], query: str = "") -> list[str]:
    """Return the documents of a query from best to worst.

    >>> ranked({"a": 1.0, "b": 2.0, "c": 1.0})
    ['b', 'c', 'a']
    """
    _check_values("score", query, scores)
    return sorted(scores, key=lambda document: (scores[document], document), reverse=True)


def reranking(
    targets: Sequence[tuple[str, str, int]],
    scores: Sequence[float],
    measures: Sequence[str] = ("ndcg@10", "mrr@10"),
    relevance_level: int = 1,
) -> dict[str, float]:
    """Evaluate a task whose examples are pairs of a query and a document, as its metric of `(targets, scores)`.

    Only documents of the task are known: a relevant document that is not among them does not lower the result.

    Args:
      targets: (query id, document id, grade) of each example.
      scores: the model's scores.
      measures: see `per_query`.
      relevance_level: lowest grade of a relevant document.

    Raises:
      UserError: if a target does not have this form, or a document occurs twice for a query.
    """
    check_pairs("reranking", targets, scores, "scores")
    qrels: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for target, score in zip(targets, numbers("reranking", "scores", scores), strict=True):
        try:
            query, document, grade = target
        except (TypeError, ValueError) as error:
            raise UserError(f"reranking: a target must be (query, document, grade), not {str(target)[:80]}") from error
        query, document = str(query), str(document)
        if document in run.setdefault(query, {}):
            raise UserError(f"reranking: document {document!r} occurs twice for query {query!r}.")
        run[query][document] = float(score)
        qrels.setdefault(query, {})[document] = grade
    return evaluate(qrels, run, measures, relevance_level=relevance_level)


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs over the same queries.

    Attributes:
      queries: number of queries.
      difference: mean of the second run minus mean of the first.
      t_test: two-sided p value of the paired t-test.
      randomization: two-sided p value of the paired randomization test.
    """

    queries: int
    difference: float
    t_test: float
    randomization: float


def compare(
    first: Mapping[str, float], second: Mapping[str, float], *, samples: int = 10_000, seed: int = 0
) -> RunComparison:
    """Test whether two runs differ significantly in a measure.

    Args:
      first: {query: value} of a measure, see `per_query`.
      second: the same for the other run.
      samples: number of samples of the randomization test.
      seed: seed of these samples.

    Raises:
      UserError: if the queries differ, or there are fewer than two.
    """
    if first.keys() != second.keys():
        unshared = sorted(map(str, first.keys() ^ second.keys()))
        shown = ", ".join(unshared[:5]) + (" …" if len(unshared) > 5 else "")
        raise UserError(
            f"The runs were not evaluated on the same queries: {shown} occur in only one of them. Evaluate both with "
            "missing_as_zero=True."
        )
    if len(first) < 2:
        raise UserError("A comparison of runs needs at least two queries.")
    differences = np.array([second[query] - first[query] for query in first])
    p_value = _randomization_test(differences, samples, np.random.default_rng(seed))
    return RunComparison(len(differences), float(differences.mean()), _t_test(differences), p_value)


def table(runs: Mapping[str, PerQuery], significance: float = 0.05) -> str:
    """Format the means of several runs as a table; * marks significant differences from the first run.

    Args:
      runs: {name: result of `per_query`}, all with the same measures and queries.
      significance: p value of the paired t-test below which a difference is significant.

    Raises:
      UserError: if there is no run, or the measures or queries differ.
    """
    if not runs:
        raise UserError("There are no runs.")
    first, base = next(iter(runs.items()))

    def cell(values: PerQuery, measure: str) -> str:
        mean = float(np.mean(list(values[measure].values())))
        testable = values is not base and len(base[measure]) > 1
        differs = testable and compare(base[measure], values[measure], samples=0).t_test < significance
        return f"{mean:.4f}{'*' if differs else ' '}"

    rows = [["run", *(f"{measure} " for measure in base)]]
    for name, values in runs.items():
        if values.keys() != base.keys():
            raise UserError(f"Runs {first!r} and {name!r} have different measures. Evaluate both with the same.")
        rows.append([name, *(cell(values, measure) for measure in base)])
    head, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([name.ljust(head), *map(str.rjust, cells, widths)]).rstrip() for name, *cells in rows]
    queries = len(next(iter(base.values()), ()))
    note = f"{queries} queries" + (f"; * p < {significance:g} against {first}" if len(runs) > 1 else "")
    return "\n".join([*lines, note])


def _value(measure: str, grades: np.ndarray, ideal: np.ndarray, level: int, cutoff: int | None) -> float:
    """Compute a measure of one query.

    Args:
      measure: its name without the cutoff.
      grades: grades of the retrieved documents in the order of the run, up to the cutoff.
      ideal: all positive grades in descending order.
      level: lowest grade of a relevant document.
      cutoff: k, or None.
    """
    if measure == "ndcg":
        return _discounted_gain(grades) / _discounted_gain(ideal[:cutoff]) if len(ideal) else 0.0
    hits = np.flatnonzero(grades >= level)
    if not len(hits):
        return 0.0
    if measure == "mrr":
        return 1.0 / (int(hits[0]) + 1)
    if measure == "precision":
        return len(hits) / (cutoff or len(grades))
    total = len(hits) if measure == "recall" else float((np.arange(1, len(hits) + 1) / (hits + 1)).sum())
    return total / int((ideal >= level).sum())


def _discounted_gain(grades: np.ndarray) -> float:
    return float((grades / np.log2(np.arange(len(grades)) + 2)).sum())


def _parse_measure(text: str) -> tuple[str, int | None]:
    """Split "name@k" into the name and k, which is None for the whole ranking."""
    parts = re.fullmatch(r"(?:(ndcg|mrr|map)|(recall|precision)(?=@))(?:@([1-9][0-9]*))?", text)
    if parts is None:
        raise UserError(f"Unknown measure {text!r}. Use ndcg@k, mrr@k, map@k, recall@k, precision@k, ndcg, mrr or map.")
    return parts[1] or parts[2], None if parts[3] is None else int(parts[3])


def _queries(qrels: Qrels, run: Run, missing_as_zero: bool) -> list[str]:
    for what, values in (("qrels", qrels), ("run", run)):
        if not isinstance(values, Mapping) or not all(isinstance(of_query, Mapping) for of_query in values.values()):
            raise UserError(f"{what} must be {{query: {{document: number}}}}; read_{what} reads it from a file.")
    shared = [query for query in qrels if query in run]
    if not shared:
        raise UserError(f"No query of run ({_some(run)}) is in qrels ({_some(qrels)}). Use the same ids, as strings.")
    if missing_as_zero:
        return list(qrels)
    if missing := len(qrels) - len(shared):
        logger.warning("ignoring %d of %d judged queries that the run lacks (see missing_as_zero)", missing, len(qrels))
    return shared


def _check_values(what: str, query: str, values: Mapping[str, float]) -> None:
    for document, value in values.items():
        if not isinstance(document, str):
            raise UserError(f"Query {query!r}: the document id {document!r} must be a string.")
        if not isinstance(value, int | float | np.number) or math.isnan(value):
            raise UserError(f"Query {query!r}, document {document!r}: the {what} must be a number, not {value!r}.")


def _some(queries: Mapping[str, Any]) -> str:
    first = ", ".join(repr(query) for query in list(queries)[:3])
    return f"{first}, …" if len(queries) > 3 else first or "none"


def _t_test(differences: np.ndarray) -> float:
    from scipy.stats import ttest_1samp  # here, because the import is slow

    if np.ptp(differences) <= 1e-12:  # t is undefined if all differences are equal
        return 1.0 if abs(differences[0]) <= 1e-12 else 0.0
    return float(ttest_1samp(differences, 0.0).pvalue)


def _randomization_test(differences: np.ndarray, samples: int, rng: np.random.Generator) -> float:
    observed = abs(differences.sum())
    as_extreme = 1  # the observed signs are one of the possible assignments
    for start in range(0, samples, 100):
        count = min(100, samples - start)
        signs = rng.choice((-1.0, 1.0), (count, len(differences)))
        as_extreme += int((np.abs(signs @ differences) >= observed - 1e-12).sum())
    return as_extreme / (samples + 1)
