import gzip
import itertools
import json
import logging
import math

import numpy as np
import pytest
import scipy.stats

from t5x import metrics
from t5x._runtime.errors import UserError
from t5x.apps.ranking.ranking_files import read_qrels
from t5x.metrics import ranking
from tests.support.paths import SHARED

MSMARCO = SHARED / "msmarco_dl"
needs_msmarco = pytest.mark.skipif(not MSMARCO.is_dir(), reason="TREC DL (../shared/data/msmarco_dl) is not here")

# Results of ranx 0.3.21 for BM25: {(year, relevance level): …}
RECORDED = {
    (19, 1): {
        "ndcg@10": 0.5058310024399073,
        "ndcg@100": 0.5018019212885747,
        "mrr@10": 0.8233204134366925,
        "recall@10": 0.12847703679948552,
        "map": 0.29928357160323243,
        "precision@5": 0.6930232558139534,
    },
    (19, 2): {
        "mrr@10": 0.7024178663713547,
        "recall@100": 0.49104957351440587,
        "map": 0.24759970706120715,
        "map@10": 0.12722168847006304,
        "precision@10": 0.4116279069767442,
    },
    (21, 1): {
        "ndcg@10": 0.4457881591214507,
        "ndcg@100": 0.39133400072522495,
        "mrr@10": 0.8428421683138665,
        "recall@10": 0.07564129205889696,
        "map": 0.21220688279834649,
        "precision@5": 0.7094339622641508,
    },
    (21, 2): {
        "mrr@10": 0.4980533093740641,
        "recall@100": 0.3261024605287327,
        "map": 0.13575235443775105,
        "map@10": 0.06218056089762156,
        "precision@10": 0.3547169811320755,
    },
}


def _bm25(year: int, field: str) -> dict[str, dict[str, float]]:
    with gzip.open(MSMARCO / f"bm25_top100_dl{year}.json.gz") as file:
        queries = json.load(file)
    sign = -1 if field == "rank" else 1
    return {
        str(query["hits"][0]["qid"]): {hit["docid"]: sign * hit[field] for hit in query["hits"]} for query in queries
    }


@needs_msmarco
@pytest.mark.parametrize("year", [19, 21])
def test_bm25_on_trec_deep_learning(year):
    qrels = read_qrels(MSMARCO / f"qrels.dl{year}-passage.txt")
    known = {19: 0.5058, 21: 0.4458}[year]
    assert ranking.evaluate(qrels, _bm25(year, "score"), ["ndcg@10"])["ndcg@10"] == pytest.approx(known, abs=5e-5)
    for level in (1, 2):
        recorded = RECORDED[year, level]
        found = ranking.evaluate(qrels, _bm25(year, "rank"), list(recorded), relevance_level=level)
        assert found == pytest.approx(recorded, abs=1e-9)


def _brute_force(measure: str, judged: dict[str, int], scores: dict[str, float], level: int) -> float:
    """Compute a measure by definition, rank by rank."""
    name, _, k = measure.partition("@")
    k = int(k) if k else len(scores)
    order = sorted(sorted(scores, reverse=True), key=lambda document: -scores[document])[:k]
    is_relevant = lambda document: judged.get(document, 0) >= level
    relevant = sum(map(is_relevant, judged))
    ranks = [rank for rank, document in enumerate(order, start=1) if is_relevant(document)]
    if name == "mrr":
        return 1 / ranks[0] if ranks else 0.0
    if name == "precision":
        return len(ranks) / k
    if name == "recall":
        return len(ranks) / relevant if relevant else 0.0
    if name == "map":
        return sum(sum(r <= rank for r in ranks) / rank for rank in ranks) / relevant if relevant else 0.0
    discounted = lambda grades: sum(max(grade, 0) / math.log2(rank + 1) for rank, grade in enumerate(grades, start=1))
    ideal = discounted(sorted(judged.values(), reverse=True)[: k if "@" in measure else None])
    return discounted(judged.get(document, 0) for document in order) / ideal if ideal else 0.0


@pytest.mark.parametrize("seed", range(40))
def test_measures_equal_their_definitions(seed):
    random = np.random.default_rng(seed)
    documents = [f"d{number}" for number in range(12)]
    some = lambda: random.choice(documents, random.integers(1, 13), replace=False).tolist()
    # Negative grades, queries without relevant documents, equal scores, queries on one side only.
    qrels = {f"q{n}": {d: int(random.integers(-1, 4 if n else 1)) for d in some()} for n in range(5)}
    run = {f"q{n}": {d: float(random.integers(0, 4)) for d in some()} for n in range(1, 7)} | {"q0": {"d1": 1.0}}
    measures = ["ndcg@3", "ndcg@20", "ndcg", "mrr@2", "mrr", "map@4", "map", "recall@3", "precision@3", "precision@20"]
    for level in (1, 2):
        found = ranking.per_query(qrels, run, measures, relevance_level=level)
        for measure in measures:
            assert list(found[measure]) == list(qrels)
            for query, value in found[measure].items():
                assert value == pytest.approx(_brute_force(measure, qrels[query], run[query], level))


def test_equal_scores_are_ordered_by_descending_id():
    ranked = ranking.ranked({"a": 1.0, "b": 1.0, "B": 1.0, "c": 0.5, "10": 1.0, "9": 1.0})
    assert ranked == ["b", "a", "B", "9", "10", "c"]
    assert ranking.evaluate({"q": {"a": 1}}, {"q": {"a": 1.0, "b": 1.0}}, ["mrr"]) == {"mrr": 0.5}


def test_missing_and_unjudged_queries_and_those_without_relevant_documents(caplog):
    qrels = {"hit": {"d": 1}, "missing": {"d": 1}, "nothing": {"d": 0}}
    run = {"hit": {"d": 1.0}, "nothing": {"d": 1.0}, "unjudged": {"d": 1.0}}
    with caplog.at_level(logging.WARNING):
        assert ranking.evaluate(qrels, run, ["mrr@10"]) == {"mrr@10": pytest.approx(1 / 2)}
    assert "1 of 3 " in caplog.text and "missing_as_zero" in caplog.text
    caplog.clear()
    assert ranking.evaluate(qrels, run, ["mrr@10"], missing_as_zero=True) == {"mrr@10": pytest.approx(1 / 3)}
    found = ranking.per_query(qrels, run, ["ndcg@10"], missing_as_zero=True)
    assert found == {"ndcg@10": {"hit": 1.0, "missing": 0.0, "nothing": 0.0}}
    assert caplog.text == ""


def test_invalid_input_is_rejected():
    qrels, run = {"q": {"d": 1}}, {"q": {"d": 1.0}}
    for measure in ("recall", "precision", "ndcg@0", "ndcg@", "MRR@10", "err@10"):
        with pytest.raises(UserError, match=f"'{measure}'.*ndcg@k"):
            ranking.evaluate(qrels, run, [measure])
    with pytest.raises(UserError, match=r"run \(7\).*\('q'\)"):
        ranking.evaluate(qrels, {7: {"d": 1.0}})
    with pytest.raises(UserError, match=r"document id 7 .*string"):
        ranking.evaluate(qrels, {"q": {7: 1.0}})
    with pytest.raises(UserError, match=r"document 'd': the score .*nan"):
        ranking.evaluate(qrels, {"q": {"d": float("nan")}})
    with pytest.raises(UserError, match=r"document 'd': the grade .*'1'"):
        ranking.evaluate({"q": {"d": "1"}}, run)
    with pytest.raises(UserError, match=r"run .*\{query: \{document: number\}\}"):
        ranking.evaluate(qrels, {"q": ["d"]})
    with pytest.raises(UserError, match="relevance_level=0"):
        ranking.evaluate(qrels, run, relevance_level=0)


def test_reranking_as_a_task_metric():
    targets = [("q1", "a", 0), ("q1", "b", 2), ("q2", "a", 1), (3, "x", 0), (3, "y", 0)]
    found = metrics.reranking(targets, [0.9, 0.1, -5.0, 0.0, 1.0], measures=("mrr@10", "ndcg@10"))
    assert found == pytest.approx({"mrr@10": (1 / 2 + 1 + 0) / 3, "ndcg@10": (1 / math.log2(3) + 1 + 0) / 3})
    with pytest.raises(UserError, match=r"\(query, document, grade\).* 1"):
        metrics.reranking([1], [0.5])
    with pytest.raises(UserError, match=r"'a' .*twice.*'q1'"):
        metrics.reranking([("q1", "a", 0), ("q1", "a", 0)], [0.5, 0.6])


def test_significance():
    random = np.random.default_rng(0)
    first = {str(query): value for query, value in enumerate(random.random(12))}
    second = {query: value + random.normal(0.15, 0.3) for query, value in first.items()}
    found = ranking.compare(first, dict(reversed(second.items())))
    differences = np.array([second[query] - first[query] for query in first])
    assert found.queries == 12
    assert found.difference == pytest.approx(differences.mean())
    assert found.t_test == pytest.approx(scipy.stats.ttest_rel(list(second.values()), list(first.values())).pvalue)
    signs = np.array(list(itertools.product((-1, 1), repeat=12)))
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12)
    assert 0.01 < exact < 0.5
    assert found.randomization == pytest.approx(exact, abs=0.02)
    assert ranking.compare(first, second) == ranking.compare(first, second)


@pytest.mark.filterwarnings("error")
def test_significance_at_the_edges():
    first = {str(query): 0.1 * query for query in range(20)}
    same = ranking.compare(first, first)
    assert (same.t_test, same.randomization) == (1.0, 1.0)
    better = ranking.compare(first, {query: value + 0.5 for query, value in first.items()})
    assert better.t_test == 0.0
    assert better.randomization < 0.001
    with pytest.raises(UserError, match=r"same queries: 0 .*missing_as_zero=True"):
        ranking.compare(first, {query: 0.0 for query in first if query != "0"})
    with pytest.raises(UserError, match="two queries"):
        ranking.compare({"q": 1.0}, {"q": 0.0})


def test_the_table_of_runs():
    queries = [str(query) for query in range(10)]
    bm25 = {"ndcg@10": {q: 0.1 * i for i, q in enumerate(queries)}, "map": dict.fromkeys(queries, 0.25)}
    model = {"ndcg@10": {q: 0.05 * i + 0.5 for i, q in enumerate(queries)}, "map": dict.fromkeys(queries, 0.25)}
    assert ranking.table({"bm25": bm25, "a model": model}).split("\n") == [
        "run      ndcg@10      map",
        "bm25      0.4500   0.2500",
        "a model   0.7250*  0.2500",
        "10 queries; * p < 0.05 against bm25",
    ]
    assert ranking.table({"bm25": bm25}).endswith("\n10 queries")
    with pytest.raises(UserError, match=r"'bm25' and 'x' .*measures"):
        ranking.table({"bm25": bm25, "x": {"map": bm25["map"]}})
