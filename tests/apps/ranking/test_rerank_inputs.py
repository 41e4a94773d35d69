"""What is reranked, from each kind of input."""

import gzip
import io
import json
import math
import os
import sys
import tempfile
import types
from pathlib import Path

import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking.ranking_files import read_qrels
from t5x.apps.ranking.rerank_inputs import ListWork, PairWork, RankingUnit, RunWork
from t5x.metrics.ranking import evaluate
from tests.apps.ranking.test_collections import write
from tests.support.paths import SHARED


def units(work):
    return list(work.units(0, len(work.sizes)))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")
@pytest.mark.parametrize(("year", "ndcg", "queries"), [(19, 0.5058, 43), (21, 0.4458, 53)])
def test_the_candidates_of_trec_deep_learning_have_the_ndcg_that_bm25_is_known_for(year, ndcg, queries):
    work = ListWork(str(SHARED / "msmarco_dl" / f"bm25_top100_dl{year}.json.gz"), None)
    qrels = read_qrels(SHARED / "msmarco_dl" / f"qrels.dl{year}-passage.txt")
    assert len(work.sizes) == queries and set(work.sizes) == {100} and work.empty == 0
    assert evaluate(qrels, work.before, ["ndcg@10"])["ndcg@10"] == pytest.approx(ndcg, abs=5e-5)


def run_files(tmp_path):
    run = write(tmp_path / "run", "q2 Q0 d1 1 0.5 x", "q2 Q0 d2 2 0.9 x", "q1 Q0 d3 1 3 x", "q2 Q0 d3 3 0.7 x")
    topics = write(tmp_path / "topics.tsv", "q1\tone?", "q2\ttwo?", "q3\tthree?")
    collection = write(tmp_path / "c.tsv", *(f"d{i}\ttext {i}" for i in range(5)))
    return str(run), str(collection), str(topics)


def test_a_run_is_read_in_its_order(tmp_path):
    work = RunWork(*run_files(tmp_path), None, skip_unknown=False)
    assert work.sizes == [3, 1] and work.before["q2"] == {"d1": 0.5, "d2": 0.9, "d3": 0.7}
    assert units(work) == [
        RankingUnit("q2", "two?", ["d1", "d2", "d3"], ["text 1", "text 2", "text 3"], []),
        RankingUnit("q1", "one?", ["d3"], ["text 3"], []),
    ]
    assert list(work.units(1, 2)) == units(work)[1:]


def test_the_first_of_a_run_are_those_with_the_best_scores(tmp_path):
    work = RunWork(*run_files(tmp_path), 2, skip_unknown=False)
    assert work.sizes == [2, 1]
    assert units(work)[0] == RankingUnit("q2", "two?", ["d2", "d3"], ["text 2", "text 3"], ["d1"])


def test_unknown_ids_are_an_error_or_skipped_and_counted(tmp_path, caplog):
    run, collection, topics = run_files(tmp_path)
    write(Path(run), "q2 Q0 d1 1 2 x", *(f"q2 Q0 e{i} 2 1 x" for i in range(7)), "q7 Q0 d1 1 1 x", "q1 Q0 e1 1 1 x")
    with pytest.raises(UserError, match=r"^1 query id\(s\) of .*run are not in .*topics.tsv: q7. .*--skip_unknown"):
        RunWork(run, collection, topics, None, skip_unknown=False)
    work = RunWork(run, collection, topics, None, skip_unknown=True)
    assert [(u.query_id, u.doc_ids) for u in units(work)] == [("q2", ["d1"])]
    assert (
        "1 query id(s)" in caplog.text and "7 document id(s)" in caplog.text and "e0, e1, e2, e3, e4, …" in caplog.text
    )
    write(Path(topics), "q1\tone?", "q2\ttwo?", "q7\tx")
    with pytest.raises(UserError, match=r"^7 document id\(s\) of .*run are not in .*c.tsv: e0, e1, e2, e3, e4, …"):
        RunWork(run, collection, topics, None, skip_unknown=False)


def test_the_digest_is_that_of_all_that_counts(tmp_path):
    digest = lambda: RunWork(*run_files(tmp_path), None, skip_unknown=False).digest
    first = digest()
    assert digest() == first
    files = run_files(tmp_path)
    write(tmp_path / "topics.tsv", "q1\tone?", "q2\ttwo!")
    assert RunWork(*files, None, skip_unknown=False).digest != first


def test_candidates_of_both_layouts(tmp_path):
    old = {"query": "who?", "hits": [{"content": "b", "qid": 7, "docid": "x", "rank": 1, "score": 2.5},
                                     {"content": "a", "qid": 7, "docid": "y", "rank": 2, "score": 3.5}]}  # fmt: skip
    new = {"query": {"text": "what?", "qid": "8"}, "candidates": [{"docid": "z", "score": 1, "doc": {"contents": "c"}}]}
    (tmp_path / "list.json").write_text(json.dumps([old, new], indent=1))
    write(tmp_path / "lines.jsonl.gz", old, new)
    for name in ("list.json", "lines.jsonl.gz"):
        work = ListWork(str(tmp_path / name), 1)
        expected = [RankingUnit("7", "who?", ["y"], ["a"], ["x"]), RankingUnit("8", "what?", ["z"], ["c"], [])]
        assert units(work) == expected
        assert work.before == {"7": {"x": 2.5, "y": 3.5}, "8": {"z": 1.0}}


@pytest.mark.parametrize("beside", [{"qid": "264014"}, {"query_id": 264014}])
def test_the_id_of_a_query_may_be_beside_it(beside, tmp_path):
    hits = [{"docid": "x", "content": "a"}, {"docid": "y", "qid": "264014", "content": "b"}]
    work = ListWork(str(write(tmp_path / "x.jsonl", {"query": "who?", "hits": hits} | beside)), None)
    assert list(work.before) == ["264014"] == list(work.query_ids)
    for wrong in ([{"qid": "7", "content": "a"}], [hits[0], hits[1] | {"qid": 7}]):
        write(tmp_path / "x.jsonl", {"query": "who?", "hits": wrong} | beside)
        with pytest.raises(UserError, match=r"entry 1, candidate \d: the query id is '7' here, '264014' before"):
            ListWork(str(tmp_path / "x.jsonl"), None)


def test_fields_that_a_candidate_does_not_need_are_not_checked(tmp_path):
    hits = [{"docid": str(i), "doc": "a", "score": i, "rank": rank} for i, rank in enumerate(["first", None])]
    work = ListWork(str(write(tmp_path / "x.jsonl", {"query": "who?", "hits": hits})), None)
    assert work.before == {"1": {"0": 0.0, "1": 1.0}}


HIT = {"docid": "x", "content": "a", "score": 1.5}
BROKEN_HITS = {
    "a rank": ({"content": "a", "rank": "1"}, "the rank is '1'"),
    "no rank": ({"content": "a", "rank": None}, "the rank is 'None'"),
    "no score": (HIT | {"score": None}, "the score is 'None'"),
    "a list of scores": (HIT | {"score": [1]}, r"the score is '\[1\]'"),
    "no number": (HIT | {"score": math.nan}, "the score is 'nan'"),
    "too much": (HIT | {"score": 10**400}, "the score is '1000.*'"),
    "no text": (HIT | {"doc": None}, "\"doc\" is 'None'"),
    "a list of texts": (HIT | {"doc": ["a"]}, '"doc" is .*'),
    "half a surrogate": ('{"doc": "\\ud800"}', '"doc" has half of a surrogate pair'),
    "half a surrogate in an id": ('{"docid": "\\ud800", "doc": "a"}', '"docid" has half of a surrogate pair'),
    "a space in an id": (HIT | {"docid": "x y"}, "'x y' cannot be written as an id"),
}


@pytest.mark.parametrize("case", BROKEN_HITS)
def test_broken_candidates_raise_user_error(case, tmp_path):
    hit, message = BROKEN_HITS[case]
    hit = hit if isinstance(hit, str) else json.dumps(hit)
    path = write(tmp_path / "x", {"query": "a", "hits": [HIT]}, f'{{"query": "who?", "qid": 7, "hits": [{hit}]}}')
    with pytest.raises(UserError, match=f"x, entry 2, candidate 1: {message}"):
        ListWork(str(path), None)


def test_pairs_with_and_without_ids(tmp_path):
    named = write(tmp_path / "a.jsonl", {"query_id": "q", "query": "who?", "doc_id": 3, "text": "he"},
                  {"qid": "q", "query": "who?", "docid": "4", "passage": "she"},
                  {"qid": "p", "query": "how?", "docid": "4", "passage": "so"})  # fmt: skip
    expected = [RankingUnit("q", "who?", ["3", "4"], ["he", "she"], []), RankingUnit("p", "how?", ["4"], ["so"], [])]
    assert units(PairWork(str(named), by_query=True)) == expected
    single = units(PairWork(str(named), by_query=False))
    assert single[1] == RankingUnit("q", "who?", ["4"], ["she"], []) and len(single) == 3
    four = write(tmp_path / "b.tsv.gz", "q\t3\twho?\the", "q\t4\twho?\tshe", "p\t4\thow?\tso")
    assert units(PairWork(str(four), by_query=True)) == expected
    two = write(tmp_path / "c.tsv", "who?\the", "who?\tshe", "how?\tso")
    assert [(u.query_id, u.doc_ids) for u in units(PairWork(str(two), by_query=True))] == [
        ("1", ["1", "2"]),
        ("2", ["3"]),
    ]


def test_standard_input_is_read_once_and_given_many_times(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"who?\the\nwho?\t\n")))
    work = PairWork("-", by_query=True)
    assert units(work) == units(work) == [RankingUnit("1", "who?", ["1", "2"], ["he", ""], [])]
    assert work.empty == 1
    assert not os.listdir(tmp_path)  # whatever ends the program now, no copy stays


BROKEN = {
    "apart": (["q\t1\twho?\ta", "p\t1\thow?\ta", "q\t2\twho?\tb"], "x:3: query 'q' occurred before"),
    "twice": (["q\t1\twho?\ta", "q\t1\twho?\tb"], "x:2: document '1' occurs a second time for query 'q'"),
    "two texts": (["q\t1\twho?\ta", "q\t2\thow?\tb"], r"x:2: query 'q' is 'how\?' here"),
    "no id of the query": (["\t1\twho?\ta"], "x:1: the query_id is empty"),
    "no id of the passage": (["q\t\twho?\ta"], "x:1: the doc_id is empty"),
    "ids here and there": (
        [{"query": "a", "text": "b"}, {"query_id": 1, "query": "c", "text": "d"}],
        "x:2 has a query_id, unlike the lines before it",
    ),
    "an id that is missing": (["q\t1\twho?\ta", {"qid": "q", "query": "who?", "text": "b"}], "x:2 has no doc_id"),
    "half a surrogate in an id": (['{"query_id": "\\ud800", "query": "a", "text": "b"}'], 'x:1: "query_id" has half'),
    "nothing": ([], "x is empty"),
    "an empty query": (["q\t1\t \ta"], "x:1: the query is empty"),
    "three columns": (["q\twho?\ta"], r"x:1 has 3 column\(s\)"),
    "other columns": (["who?\ta", "q\t1\twho?\ta"], r"x:2 has 4 column\(s\).*the same in all lines"),
    "no query": ([{"text": "a"}], "x:1 has no query .fields: text"),
    "a number as text": ([{"query": "a", "text": 3}], "x:1: \"text\" is '3'"),
    "a space in an id": ([{"query_id": "a b", "query": "a", "text": "b"}], "x:1: 'a b' cannot be written as an id"),
    "half a surrogate": (['{"query": "\\ud800", "text": "b"}'], 'x:1: "query" has half of a surrogate pair'),
    "half a line": (['{"query": "a", "te'], "x:1 is not JSON"),
}


ONLY_RANKED = ("apart", "twice", "a space in an id")


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pairs_raise_user_error(case, tmp_path):
    lines, message = BROKEN[case]
    path = str(write(tmp_path / "x", *lines))
    with pytest.raises(UserError, match=message):
        PairWork(path, by_query=True)
    if case in ONLY_RANKED:
        assert len(PairWork(path, by_query=False).sizes) == len(lines)
    else:
        with pytest.raises(UserError, match=message):
            PairWork(path, by_query=False)


def test_pairs_that_stay_in_their_order_keep_no_texts_and_their_ids_mean_one_query(tmp_path, caplog):
    lines = ["q\t1\twho?\ta", "q\t1\twho?\tb", "p\t1\thow?\ta", "q\t1\twho?\tc"]
    asked = []
    work = PairWork(str(write(tmp_path / "x", *lines)), by_query=False, check=lambda *query: asked.append(query))
    assert asked == [("q", "who?"), ("p", "how?"), ("q", "who?")] and work.num_queries == 2
    assert set(work.query_ids) == {"q", "p"} and "who?" not in str(vars(work))
    assert "1 document(s) occur twice for a query" in caplog.text
    with pytest.raises(UserError, match=r"x:5: query 'q' is 'why\?' here"):
        PairWork(str(write(tmp_path / "x", *lines, "q\t2\twhy?\ta")), by_query=False)
    numbered = PairWork(str(write(tmp_path / "x", "who?\ta", "who?\ta", "how?\ta", "who?\tb")), by_query=False)
    assert numbered.num_queries == 3 and not list(numbered.query_ids)


def test_truncated_gzip_raises_user_error(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"".join(b"who?\ttext %d\n" % i for i in range(999)))[:-100])
    with pytest.raises(UserError, match=r"x.gz is not a complete gzip file"):
        PairWork(str(tmp_path / "x.gz"), by_query=True)


def test_tables_with_a_header_are_read_by_their_columns(tmp_path):
    (tmp_path / "x.tsv").write_text("label\tquery\ttext\n1\twhat?\tA quark.\n0\twhat?\tA duck.\n")
    (tmp_path / "x.csv").write_text('query_id,doc_id,query,text,label\nq,a,what?,"A, quark.",1\n')
    (tmp_path / "other.tsv").write_text("question\tpassage\nwhat?\tA quark.\n")
    tsv = units(PairWork(str(tmp_path / "x.tsv"), by_query=True))
    assert [(unit.query, unit.texts) for unit in tsv] == [("what?", ["A quark.", "A duck."])]
    (csv,) = units(PairWork(str(tmp_path / "x.csv"), by_query=True))
    assert (csv.query_id, csv.doc_ids, csv.texts) == ("q", ["a"], ["A, quark."])
    with pytest.raises(UserError, match=r"other.tsv has the columns question, passage.*query and text"):
        PairWork(str(tmp_path / "other.tsv"), by_query=True)
