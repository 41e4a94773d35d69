"""`t5x rerank`: the same scores whatever is computed together, through interruptions, in every format."""

import io
import itertools
import json
import math
import os
import sys
import types

import numpy as np
import pytest

from t5x import load
from t5x._runtime.errors import UserError
from t5x.apps.ranking import rerank_job
from t5x.apps.ranking.ranking_files import read_run
from t5x.apps.ranking.ranking_options import RerankOptions
from t5x.apps.ranking.rerank_inputs import RankingUnit
from t5x.apps.ranking.rerank_job import rerank, symmetric_sum
from t5x.apps.ranking.reranker import PassageWindows, Reranker
from t5x.apps.ranking.templates import PairTemplate
from t5x.inference.output import FileOutput
from tests.apps.ranking.test_collections import write
from tests.inference.models import byte_model
from tests.support import commands

QUERIES, PASSAGES = 5, 9
OPTIONS = {"template": "{query} {document} ?", "labels": "a,b", "max_length": 24, "batch_size": 8}
# The lengths of inputs, and so the programs that are compiled, are few: 8 and 24.
FLAGS = [f"--{name}={value}" for name, value in OPTIONS.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with `model`, `run`, `topics.tsv` and `c.tsv`."""
    directory = tmp_path_factory.mktemp("rerank")
    byte_model(directory / "model")
    rng = np.random.default_rng(0)
    short = ["".join(letters) for letters in itertools.permutations("abcde", 3)]
    bodies = [short[i] if i % 3 else "".join(rng.choice(list("abcdefgh"), 17 + i)) for i in range(QUERIES * PASSAGES)]
    write(directory / "c.tsv", *(f"d{i}\t{text}" for i, text in enumerate(bodies)))
    write(directory / "topics.tsv", *(f"q{i}\t{'abcdefgh'[i]}" for i in range(QUERIES)))
    lines = []
    for query in range(QUERIES):
        for rank, doc in enumerate(rng.permutation(QUERIES * PASSAGES)[: PASSAGES + query], start=1):
            lines.append(f"q{query} Q0 d{doc} {rank} {100 - rank} bm25")
    write(directory / "run", *lines)
    write(directory / "qrels", *(f"{line.split()[0]} 0 {line.split()[2]} {i % 3}" for i, line in enumerate(lines)))
    return directory


@pytest.fixture(autouse=True, scope="module")
def one_model(place):
    """The model is loaded and compiled once for all tests here."""
    loaded = load(str(place / "model"))
    kept, rerank_job.load = rerank_job.load, lambda *args, **kwargs: loaded
    yield loaded
    rerank_job.load = kept


def ranked(place, output, **options):
    files = {"run": "run", "collection": "c.tsv", "topics": "topics.tsv"}
    inputs = {} if "input" in options else {name: str(place / file) for name, file in files.items()}
    rerank(RerankOptions(model=str(place / "model"), output=str(output), **inputs | OPTIONS | options))
    return output.read_bytes() if "num_shards" not in options else None


@pytest.fixture(scope="module")
def expected(place, one_model):
    """{query: {document: score}}, each computed alone."""
    documents = dict(line.split("\t") for line in (place / "c.tsv").read_text().splitlines())
    queries = dict(line.split("\t") for line in (place / "topics.tsv").read_text().splitlines())
    run = read_run(place / "run")
    made = {}
    for query, of_query in run.items():
        for doc in of_query:
            (found,) = one_model.rank(queries[query], [documents[doc]], **OPTIONS)
            made.setdefault(query, {})[doc] = found.score
    return made


def close(found, expected):
    assert {query: set(of_query) for query, of_query in found.items()} == {q: set(e) for q, e in expected.items()}
    for query, of_query in expected.items():
        np.testing.assert_allclose([found[query][doc] for doc in of_query], list(of_query.values()), rtol=1e-4)


def test_a_run_has_the_scores_that_each_pair_has_alone(place, expected, tmp_path):
    content = ranked(place, tmp_path / "out.trec", checkpoint_period=2)
    close(read_run(tmp_path / "out.trec"), expected)
    lines = [line.split() for line in content.decode().splitlines()]
    assert len({tuple(line[:1] + line[2:3]) for line in lines}) == len(lines) == sum(map(len, expected.values()))
    for query in expected:
        of_query = [line for line in lines if line[0] == query]
        assert [int(line[3]) for line in of_query] == list(range(1, len(of_query) + 1))
        assert [float(line[4]) for line in of_query] == sorted((float(line[4]) for line in of_query), reverse=True)
    assert os.listdir(tmp_path) == ["out.trec"]


def test_neither_chunks_nor_chunks_nor_shards_change_scores(place, expected, tmp_path):
    for shard in (1, 0):
        ranked(place, tmp_path / "out", num_shards=2, shard_id=shard, checkpoint_period=1)
    parts = [(tmp_path / f"out-0000{i}-of-00002").read_bytes() for i in range(2)]
    queries = [{line.split()[0] for line in part.splitlines()} for part in parts]
    assert not queries[0] & queries[1], "a query is in one shard"
    (tmp_path / "all").write_bytes(b"".join(parts))
    close(read_run(tmp_path / "all"), expected)


def test_json_lines_are_in_the_order_of_the_input_with_logits(place, expected, tmp_path):
    content = ranked(place, tmp_path / "out.jsonl", format="jsonl")
    lines = [json.loads(line) for line in content.splitlines()]
    order = [(query, doc) for query, of_query in read_run(place / "run").items() for doc in of_query]
    assert [(line["query_id"], line["doc_id"]) for line in lines] == order
    for line in lines:
        softmax = 1 / (1 + math.exp(line["false_logit"] - line["true_logit"]))
        assert line["score"] == pytest.approx(math.log(softmax), rel=1e-9)
        assert line["score"] == pytest.approx(expected[line["query_id"]][line["doc_id"]], rel=1e-4)


def test_ms_marco_has_the_same_order(place, expected, tmp_path):
    ranked(place, tmp_path / "out.tsv", format="msmarco")
    ranked(place, tmp_path / "out.trec")
    trec = [line.split() for line in (tmp_path / "out.trec").read_text().splitlines()]
    assert [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()] == [
        [line[0], line[2], line[3]] for line in trec
    ]


def test_passages_behind_the_first_stay_behind_them(place, expected, tmp_path):
    ranked(place, tmp_path / "out", top=3)
    before, after = read_run(place / "run"), read_run(tmp_path / "out")
    for query, of_query in before.items():
        assert list(after[query])[3:] == list(of_query)[3:], "they keep their order"
        assert set(list(after[query])[:3]) == set(list(of_query)[:3])
        assert list(after[query].values()) == sorted(after[query].values(), reverse=True)


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_interrupted_run_resumes_with_identical_output(finished, place, tmp_path, monkeypatch):
    options = {"checkpoint_period": 2}
    whole = ranked(place, tmp_path / "whole", **options)
    compute, calls = rerank_job._Reranking.compute, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > finished:
            raise KeyboardInterrupt
        return compute(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rerank_job._Reranking, "compute", interrupted)
        ranked(place, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    if finished:
        with pytest.raises(UserError, match="batch_size was 8, is 4"):
            ranked(place, tmp_path / "out", **options | {"batch_size": 4})
        with pytest.raises(UserError, match="input was"):
            ranked(place, tmp_path / "out", top=2, **options)
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            rerank_job._Reranking, "compute", lambda *args, **kwargs: (calls.append(1), compute(*args, **kwargs))[1]
        )
        assert ranked(place, tmp_path / "out", **options) == whole
    assert len(calls) == 3 - finished
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_a_run_that_was_killed_after_its_last_rename_is_finished(place, tmp_path, monkeypatch):
    whole = ranked(place, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("t5x.inference.output.Chunks.remove", lambda chunks: (_ for _ in ()).throw(KeyboardInterrupt))
        ranked(place, tmp_path / "out")
    assert ranked(place, tmp_path / "out") == whole
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]
    with pytest.raises(UserError, match="exists already"):
        ranked(place, tmp_path / "out")
    assert ranked(place, tmp_path / "out", overwrite=True) == whole


def test_the_best_window_counts(one_model):
    passages = ["a b c d e f g h", "a b", "h h h h h h"]
    windows = PassageWindows(3, 2)
    found = one_model.rank("q", passages, windows=windows, **OPTIONS)
    cut = [(i, window) for i, passage in enumerate(passages) for window in windows.of(passage)]
    each = one_model.rank("q", cut, **OPTIONS)
    for result in found:
        best = max((window for window in each if window.doc_id == result.index), key=lambda window: window.score)
        np.testing.assert_allclose(
            (result.score, result.true_logit, result.false_logit),
            (best.score, best.true_logit, best.false_logit), rtol=1e-4,
        )  # fmt: skip
    assert windows.of(passages[0]) == ["a b c", "c d e", "e f g", "g h"] and len(windows.of("a b")) == 1


def test_the_symmetric_sum_is_that_of_its_definition():
    p = np.random.default_rng(0).random((5, 5))
    for i, found in enumerate(symmetric_sum(p)):
        assert found == pytest.approx(sum(p[i, j] + 1 - p[j, i] for j in range(5) if j != i))


def test_the_first_passages_are_ordered_by_comparing_two_and_two(place, expected, one_model, tmp_path, monkeypatch):
    template = PairTemplate("{query} {document0} {document1} ?", relevant="c", irrelevant="d", max_length=24)
    monkeypatch.setattr("t5x.apps.ranking.templates.DUOT5", template)
    written = []
    write_chunk = FileOutput.write
    monkeypatch.setattr(FileOutput, "write", lambda *args: (written.append(args[2]), write_chunk(*args))[1])
    ranked(place, tmp_path / "out", pairwise="duo", pairwise_top=3, checkpoint_period=3)
    # Of 9 to 13 passages and 6 comparisons of each query, chunks end with the query that makes 24 of them.
    assert [record["units"] for record in written] == [2, 2, 1]
    duo = Reranker(one_model, template=template, batch_size=8, pairwise=True)
    documents = dict(line.split("\t") for line in (place / "c.tsv").read_text().splitlines())
    queries = dict(line.split("\t") for line in (place / "topics.tsv").read_text().splitlines())
    for query, of_query in read_run(tmp_path / "out").items():
        before = sorted(expected[query], key=expected[query].get, reverse=True)
        top = before[:3]
        asked = [(a, b) for a in top for b in top if a != b]
        found = duo.rank([(queries[query], documents[a], documents[b]) for a, b in asked])
        wins = {pair: math.exp(result.score) for pair, result in zip(asked, found, strict=True)}
        sums = {a: sum(wins[a, b] + 1 - wins[b, a] for b in top if a != b) for a in top}
        assert list(of_query)[3:] == before[3:] and set(list(of_query)[:3]) == set(top)
        np.testing.assert_allclose([of_query[doc] for doc in top], [sums[doc] for doc in top], rtol=1e-4)
        assert list(of_query.values()) == sorted(of_query.values(), reverse=True)


def test_comparisons_need_two_labels_of_their_own(place, one_model, tmp_path):
    with pytest.raises(UserError, match="--pairwise_labels true,false"):
        ranked(place, tmp_path / "out", pairwise="duo", pairwise_labels="c")
    with pytest.raises(UserError, match=r"'true' is not a single piece .* --pairwise_labels true,false"):
        ranked(place, tmp_path / "out", pairwise="duo")
    with pytest.raises(UserError, match="is not a template for two passages"):
        Reranker(one_model, template="mt5", pairwise=True)


def test_windows_count_as_inputs_of_a_chunk():
    units = [RankingUnit(str(i), "q", ["d"], ["a b c d e f g h"], []) for i in range(4)]
    ranker = types.SimpleNamespace(windows=PassageWindows(3, 2))
    ranking = types.SimpleNamespace(ranker=ranker, _comparisons=lambda size: size)
    inputs_of = lambda unit: rerank_job._Reranking.inputs_of(ranking, unit)
    assert [len(part) for part in rerank_job._group(iter(units), 8, inputs_of)] == [2, 2]


def test_truncated_inputs_are_counted(place, tmp_path, caplog):
    path = write(
        tmp_path / "x.tsv", "a\tb", f"a\t{'c' * 99}", f"{'d' * 40}\te", f"{'d' * 40}\t{'e' * 40}", "a\tc", "a\td"
    )
    run = lambda name, **options: ranked(place, tmp_path / name, input=str(path), format="jsonl", **options)
    with pytest.raises(UserError, match=r"Query '2': The query 'd.*' leaves no room"):
        run("out")
    content = run("out", long_query="truncate")
    assert len(content.splitlines()) == 6
    assert "2 input(s) of 6 passage(s) were longer than 24 tokens" in caplog.text
    assert "2 input(s) had their query truncated" in caplog.text


def test_non_finite_scores_raise_user_error(place, tmp_path, monkeypatch):
    monkeypatch.setattr(Reranker, "logits", lambda self, encoded, **_: np.full((len(encoded.inputs), 2), np.nan))
    with pytest.raises(UserError, match=r"Query 'q0', document 'd\d+': the logits of the labels are nan, nan"):
        ranked(place, tmp_path / "out")


def test_a_window_with_a_nan_score_is_an_error(one_model, monkeypatch):
    monkeypatch.setattr(
        type(one_model),
        "label_logits",
        lambda self, inputs, *_, **__: np.array([[1, 0], [np.nan, 0], [2, 0]], np.float32),
    )
    with pytest.raises(UserError, match=r"Query 'q', passage 'a b c d e f': the logits of the labels are nan, 0.0"):
        one_model.rank("q", ["a b c d e f"], windows=PassageWindows(3, 2), **OPTIONS)


def test_rank_logs_its_template_once_and_truncated_inputs(one_model, caplog):
    caplog.set_level("INFO", logger="t5x")
    for _ in range(2):
        one_model.rank("q", ["a", ("d7", "b" * 99)], **OPTIONS | {"labels": "e,f"})
    assert caplog.text.count("template: '{query} {document} ?', e (104) against f (105)") == 1
    assert "1 input(s) of 2 passage(s) were longer than 24 tokens" in caplog.text


@pytest.mark.parametrize(
    ("query", "passages", "message"),
    [
        ("q", "a passage", "a list of passages"),
        ("q", {"d7": "a passage"}, "a list of passages"),
        ("q", None, "a list of passages"),
        (None, ["a"], "rank takes a string as its query"),
        ("q", ["a", {"id": "d7", "text": "a"}], "Passage 1 is .*"),
        ("q", [None], "Passage 0 is None"),
        ("q", [("d7", "a", 1.0)], "Passage 0 is .*"),
        ("q", [("d7", None)], "Passage 0 is .*"),
    ],
)
def test_rank_takes_texts(query, passages, message, one_model):
    with pytest.raises(UserError, match=message):
        one_model.rank(query, passages, **OPTIONS)


@pytest.mark.parametrize("pairs", ["ab", [("q",)], [("q", "a", "b")], [("q", 7)], {"q": "a"}])
def test_rank_pairs_takes_pairs_of_texts(pairs, one_model):
    with pytest.raises(UserError, match=r"Pair 0 is .*; it must be \(query, document\)"):
        one_model.rank_pairs(pairs, **OPTIONS)


def test_the_command_line_prints_measures_before_and_after(place, expected, tmp_path, capsys):
    files = {"model": "model", "run": "run", "collection": "c.tsv", "topics": "topics.tsv", "qrels": "qrels"}
    arguments = [f"--{name}={place / file}" for name, file in files.items()]
    done = commands.run(
        capsys, "rerank", *arguments, *FLAGS, f"--output={tmp_path / 'out'}", "--measures=ndcg@10,mrr@10"
    )
    assert done.code == 0, done.err
    close(read_run(tmp_path / "out"), expected)
    assert "template: '{query} {document} ?', a (100) against b (101), 24 tokens: --template" in done.err
    head, before, after, queries, *differences = done.out.splitlines()
    assert head.split() == ["run", "ndcg@10", "mrr@10"] and before.startswith("before") and after.startswith("after")
    assert queries.startswith("5 queries") and len(differences) == 2 and "t-test" in differences[0]
    again = commands.run(
        capsys, "rank-eval", f"--qrels={place / 'qrels'}", place / "run", tmp_path / "out", "--measures=ndcg@10,mrr@10",
        f"--per_query={tmp_path / 'values.jsonl'}",
    )  # fmt: skip
    assert [line.split()[1:] for line in again.out.splitlines()[1:3]] == [before.split()[1:], after.split()[1:]]
    values = [json.loads(line) for line in (tmp_path / "values.jsonl").read_text().splitlines()]
    mean = np.mean([line["ndcg@10"] for line in values if line["run"] == "out"])
    assert len(values) == 10 and f"{mean:.4f}" == after.split()[1].rstrip("*")


def test_pairs_from_standard_input_to_standard_output(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"a\tb\na\tc d\n")))
    done = commands.run(capsys, "rerank", f"--model={place / 'model'}", "--input=-", "--format=jsonl", *FLAGS)
    assert done.code == 0, done.err
    assert [json.loads(line)["doc_id"] for line in done.out.splitlines()] == ["1", "2"]


REFUSED = {
    "nothing": ([], "--candidates, or --input"),
    "two inputs": (["--run=x", "--input=y"], "--run and --input"),
    "no collection": (["--run=x"], "--run needs --collection"),
    "no topics": (["--run={place}/run", "--collection={place}/c.tsv", "--labels=a,b"], "--run needs --topics"),
    "a collection for pairs": (["--input=x", "--collection=y"], "--collection can only be used with --run"),
    "the first of pairs": (["--input=x", "--top=3"], "--top can only be used with --run"),
    "a window without max_p": (["--input=x", "--window=3"], "--window can only be used with --max_p"),
    "labels without pairwise": (["--input=x", "--pairwise_labels=a,b"], "--pairwise_labels", "with --pairwise"),
    "an empty input": (["--input=/dev/null", "--labels=a,b"], "/dev/null is empty"),
    "words left out": (["--input=x", "--max_p", "--window=3", "--stride=4"], "--window is 3", "--stride is 4"),
    "pairwise in jsonl": (["--input=x", "--pairwise=y", "--format=jsonl"], "--pairwise needs"),
    "judgments of a shard": (["--input=x", "--output=o", "--qrels=y", "--num_shards=2"], "--qrels needs a whole run"),
    "judgments of others": (
        ["--input={place}/pairs", "--output={place}/o", "--qrels={place}/qrels", "--labels=a,b"],
        "No query of the input is judged in",
    ),
    "a shard that is not there": (["--input=x", "--num_shards=2", "--shard_id=2"], "--shard_id is 2"),
    "a stream in shards": (["--input=-", "--num_shards=2"], "can be read only once"),
    "a template without a document": (["--input={place}/pairs", "--template={{query}}"], "must have {query}"),
    "labels of many pieces": (["--input={place}/pairs", "--labels=true,false"], "'true' is not a single piece", "'t'"),
    "an output that is there": (["--input={place}/pairs", "--output={place}/run"], "exists already"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_options_raise_user_error(case, place, capsys):
    write(place / "pairs", "a\tb")
    arguments, *words = REFUSED[case]
    commands.run(capsys, "rerank", f"--model={place}/model", *(a.format(place=place) for a in arguments)).refused(
        *words
    )
