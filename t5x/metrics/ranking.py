"""Measures of ranked documents, from 0 to 1, with the conventions of trec_eval.

    qrels = {"q1": {"d1": 3, "d7": 0}}     {query: {document: grade}}
    run = {"q1": {"d1": 9.5, "d2": 9.1}}   {query: {document: score}}

- The order is that of the scores (float64), whatever ranks a file has; of equal scores, the greater document id first.
- A document without a judgment, or with a negative grade, is not relevant. `relevance_level` is the grade from which
  one is: trec_eval's -l, and 2 is usual for the passages of TREC Deep Learning. nDCG takes the grade itself as gain.
- Queries of the run without judgments are left out. A query of which no document is relevant counts, as 0.
- Queries that have judgments but are not in the run are left out too, with a warning; `missing_as_zero` counts them as
  0: trec_eval's -c, and right wherever systems are compared.

    >>> evaluate({"q": {"a": 1, "b": 2}}, {"q": {"a": 0.9, "b": 0.8, "c": 0.7}}, ["mrr@10", "precision@3"])
    {'mrr@10': 1.0, 'precision@3': 0.6666666666666666}
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x.errors import UserError
from t5x.metrics.checks import check_pairs, numbers

logger = logging.getLogger(__name__)

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]
PerQuery = dict[str, dict[str, float]]

MEASURES = ("ndcg@10", "mrr@10", "recall@100", "map")


def evaluate(
    qrels: Qrels,
    run: Run,
    measures: Sequence[str] = MEASURES,
    *,
    relevance_level: int = 1,
    missing_as_zero: bool = False,
) -> dict[str, float]:
    """{measure: mean over the queries}. The arguments are those of `per_query`."""
    found = per_query(qrels, run, measures, relevance_level=relevance_level, missing_as_zero=missing_as_zero)
    return {measure: float(np.mean(list(values.values()))) for measure, values in found.items()}


def per_query(
    qrels: Qrels,
    run: Run,
    measures: Sequence[str] = MEASURES,
    *,
    relevance_level: int = 1,
    missing_as_zero: bool = False,
) -> PerQuery:
    """{measure: {query: value}}, queries in the order of `qrels`.

    Args:
      qrels: the judgments.
      run: the scores.
      measures: "ndcg@k", "mrr@k", "map@k" (all three also without "@k", for the whole ranking), "recall@k" and
        "precision@k".
      relevance_level: the grade from which a document is relevant; nothing to nDCG.
      missing_as_zero: whether queries with judgments that are not in the run count, as 0.
    """
    if relevance_level < 1:
        raise UserError(f"relevance_level={relevance_level}: documents of grade 0 are not relevant; give 1 or more.")
    functions = {measure: _measure(measure) for measure in measures}
    queries = _queries(qrels, run, missing_as_zero)
    found: PerQuery = {measure: {} for measure in functions}
    for query in queries:
        judged = qrels[query]
        _check("grade", query, judged)
        order = ranked(run.get(query, {}), query)
        grades = np.array([max(judged.get(document, 0), 0) for document in order], np.float64)
        ideal = np.sort([grade for grade in judged.values() if grade > 0])[::-1].astype(np.float64)
        for measure, (function, cutoff) in functions.items():
            found[measure][query] = function(grades[:cutoff], ideal, relevance_level, cutoff)
    return found


def ranked(scores: Mapping[str, float], query: str = "") -> list[str]:
    """The documents of a query from the best to the worst.

    >>> ranked({"a": 1.0, "b": 2.0, "c": 1.0})
    ['b', 'c', 'a']
    """
    _check("score", query, scores)
    return sorted(scores, key=lambda document: (scores[document], document), reverse=True)


def reranking(
    targets: Sequence[tuple[str, str, int]],
    scores: Sequence[float],
    measures: Sequence[str] = ("ndcg@10", "mrr@10"),
    relevance_level: int = 1,
) -> dict[str, float]:
    """Measures of a task whose examples are pairs of a query and a document: its metric of `(targets, scores)`.

    Only the documents of the task are judged: one that is relevant and not among them lowers nothing.

    Args:
      targets: (query, document, grade), the ids and the judgment of each example.
      scores: the model's.
      measures: as in `per_query`.
      relevance_level: the grade from which a document is relevant.
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
            raise UserError(f"reranking: document {document!r} is there twice for query {query!r}.")
        run[query][document] = float(score)
        qrels.setdefault(query, {})[document] = grade
    return evaluate(qrels, run, measures, relevance_level=relevance_level)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs over the same queries.

    Attributes:
      queries: how many.
      difference: mean of the second run less that of the first.
      t_test: p value of the paired t-test, two-sided.
      randomization: p value of the paired randomization test, two-sided.
    """

    queries: int
    difference: float
    t_test: float
    randomization: float


def compare(
    first: Mapping[str, float], second: Mapping[str, float], *, samples: int = 10_000, seed: int = 0
) -> Comparison:
    """Whether two runs differ in a measure by more than chance.

    Args:
      first, second: {query: value} as `per_query` gives them for one measure.
      samples: of random signs of the differences, for the randomization test.
      seed: of these.
    """
    if first.keys() != second.keys():
        odd = sorted(map(str, first.keys() ^ second.keys()))
        raise UserError(
            f"The runs were not evaluated on the same queries: {', '.join(odd[:5])}{' …' if len(odd) > 5 else ''} "
            "in one of them only. Evaluate both with missing_as_zero=True."
        )
    if len(first) < 2:
        raise UserError("A comparison of runs needs two queries or more.")
    differences = np.array([second[query] - first[query] for query in first])
    return Comparison(
        queries=len(differences),
        difference=float(differences.mean()),
        t_test=_t_test(differences),
        randomization=_randomization_test(differences, samples, np.random.default_rng(seed)),
    )


def table(runs: Mapping[str, PerQuery], significance: float = 0.05) -> str:
    """The means of several runs as a text table; * marks what differs from the first run by the paired t-test.

    Args:
      runs: {name: what `per_query` found}, all with the same measures and queries.
      significance: p value below which there is a mark.
    """
    if not runs:
        raise UserError("There is no run to show.")
    first, base = next(iter(runs.items()))

    def cell(found: PerQuery, measure: str) -> str:
        mean = float(np.mean(list(found[measure].values())))
        several = found is not base and len(base[measure]) > 1  # of a single query nothing can be said
        differs = several and compare(base[measure], found[measure], samples=0).t_test < significance
        return f"{mean:.4f}{'*' if differs else ' '}"

    rows = [["run", *(f"{measure} " for measure in base)]]
    for name, found in runs.items():
        if found.keys() != base.keys():
            raise UserError(f"Runs {first!r} and {name!r} have different measures; evaluate them with the same.")
        rows.append([name, *(cell(found, measure) for measure in base)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    queries = len(next(iter(base.values()), ()))
    note = f"{queries} queries" + (f"; * p < {significance:g} against {first}" if len(runs) > 1 else "")
    return "\n".join([*(line.rstrip() for line in lines), note])


# Measures of one query: its grades in the order of the run (up to the cutoff), all positive grades from the highest to
# the lowest, the grade from which a document is relevant, the cutoff.
_Function = Callable[[np.ndarray, np.ndarray, int, int | None], float]


def _ndcg(grades: np.ndarray, ideal: np.ndarray, level: int, cutoff: int | None) -> float:
    gain = lambda values: float((values / np.log2(np.arange(len(values)) + 2)).sum())
    return gain(grades) / gain(ideal[:cutoff]) if len(ideal) else 0.0


def _mrr(grades: np.ndarray, ideal: np.ndarray, level: int, cutoff: int | None) -> float:
    hits = np.flatnonzero(grades >= level)
    return 1.0 / (int(hits[0]) + 1) if len(hits) else 0.0


def _average_precision(grades: np.ndarray, ideal: np.ndarray, level: int, cutoff: int | None) -> float:
    hits = np.flatnonzero(grades >= level)
    precisions = np.arange(1, len(hits) + 1) / (hits + 1)
    return float(precisions.sum()) / int((ideal >= level).sum()) if len(hits) else 0.0


def _recall(grades: np.ndarray, ideal: np.ndarray, level: int, cutoff: int | None) -> float:
    hits = int((grades >= level).sum())
    return hits / int((ideal >= level).sum()) if hits else 0.0


def _precision(grades: np.ndarray, ideal: np.ndarray, level: int, cutoff: int | None) -> float:
    return int((grades >= level).sum()) / cutoff


_FUNCTIONS: dict[str, _Function] = {
    "ndcg": _ndcg,
    "mrr": _mrr,
    "map": _average_precision,
    "recall": _recall,
    "precision": _precision,
}


def _measure(name: str) -> tuple[_Function, int | None]:
    parts = re.fullmatch(r"([a-z]+)(?:@([1-9][0-9]*))?", name)
    if parts is None or parts[1] not in _FUNCTIONS or (parts[2] is None and parts[1] in ("recall", "precision")):
        raise UserError(
            f"There is no measure {name!r}. There are ndcg@k, mrr@k, map@k, recall@k and precision@k, and ndcg, mrr "
            "and map of the whole ranking."
        )
    return _FUNCTIONS[parts[1]], None if parts[2] is None else int(parts[2])


def _queries(qrels: Qrels, run: Run, missing_as_zero: bool) -> list[str]:
    for what, given in (("qrels", qrels), ("run", run)):
        if not isinstance(given, Mapping) or not all(isinstance(of_query, Mapping) for of_query in given.values()):
            raise UserError(f"{what} must be {{query: {{document: number}}}}; read_{what} reads it from a file.")
    found = [query for query in qrels if query in run]
    if not found:
        raise UserError(
            f"No query of the run ({_some(run)}) is among those with judgments ({_some(qrels)}). Are these the ids of "
            "the same collection, and all texts?"
        )
    if missing_as_zero:
        return list(qrels)
    if missing := len(qrels) - len(found):
        logger.warning(
            "%d of %d queries with judgments are not in the run and are left out; missing_as_zero counts them as 0",
            missing,
            len(qrels),
        )
    return found


def _check(what: str, query: str, values: Mapping[str, float]) -> None:
    for document, value in values.items():
        if not isinstance(document, str):
            raise UserError(f"Query {query!r}: the document id {document!r} is not a text; ids are.")
        if not isinstance(value, int | float | np.number) or math.isnan(value):
            raise UserError(
                f"Query {query!r}, document {document!r}: the {what} is {value!r}, where a number is needed."
            )


def _some(queries: Mapping[str, Any]) -> str:
    shown = ", ".join(repr(query) for query in list(queries)[:3])
    return f"{shown}, …" if len(queries) > 3 else shown or "none"


def _t_test(differences: np.ndarray) -> float:
    from scipy.stats import ttest_1samp  # where it is used: importing it takes a while

    if np.ptp(differences) <= 1e-12:  # all differ alike, which t is not defined for
        return 1.0 if abs(differences[0]) <= 1e-12 else 0.0
    return float(ttest_1samp(differences, 0.0).pvalue)


def _randomization_test(differences: np.ndarray, samples: int, rng: np.random.Generator) -> float:
    observed = abs(differences.sum())
    as_extreme = 1  # what was observed is one of the ways the signs could have come out
    for start in range(0, samples, 100):
        count = min(100, samples - start)
        signs = rng.choice((-1.0, 1.0), (count, len(differences)))
        as_extreme += int((np.abs(signs @ differences) >= observed - 1e-12).sum())
    return as_extreme / (samples + 1)
