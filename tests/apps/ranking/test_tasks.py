"""Tasks of judged passages: what is read, what is held out, what is drawn."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.apps.ranking import tasks
from t5x.apps.ranking.judged_data import JudgedDataSource, read_judgments
from t5x.apps.ranking.models import RankingFeatureConverter
from t5x.apps.ranking.templates import Template
from t5x.data.pipeline import Pipeline
from tests.support.commands import run
from tests.support.paths import SHARED

TEMPLATE = Template(text="Q: {query} D: {document} R:", relevant="1", irrelevant="0")
VOCABULARY = data.ByteVocabulary()
PAIRS = {"inputs": 40, "targets": 2}
LISTS = {"inputs": 40, "targets": 3, "grades": 3}


@pytest.fixture(autouse=True)
def registries():
    yield
    for registry in (data.MixtureRegistry, data.TaskRegistry):
        for name in registry.names():
            if name in ("pairs", "lists", "triples", "rankings", "other"):
                registry.remove(name)


def records(queries: int = 10) -> list[dict]:
    """Of every query two relevant passages, of grade 2 and 3, and four others, of grade 0 and 1."""
    grades = (0, 2, 1, 3, 0, 1)
    return [
        {"qid": q, "docid": f"d{q}.{i}", "query": f"query {q}", "passage": f"passage {q}.{i}", "grade": grade}
        for q in range(queries)
        for i, grade in enumerate(grades)
    ]


def write(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def judged(tmp_path) -> str:
    return write(tmp_path / "judged.jsonl", records())


def outputs(pipeline: Pipeline, epoch: int = 0) -> list[dict]:
    return [made for index in range(len(pipeline)) for made in pipeline.outputs(epoch, index)]


def text(ids) -> str:
    return VOCABULARY.decode(ids)


def test_every_epoch_has_the_relevant_passages_once_and_as_many_others(judged):
    task = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=0)
    assert task.splits == ("train",)
    pipeline = task.pipeline("train", PAIRS, 0)
    epochs = [outputs(pipeline, epoch) for epoch in (0, 0, 1)]
    drawn = [[(e["query_id"], e["doc_id"]) for e in epoch] for epoch in epochs]
    assert drawn[0] == drawn[1] != drawn[2]
    for epoch in epochs:
        words = collections.Counter(text(e["targets"]) for e in epoch)
        assert words == {"1": 20, "0": 20}
        relevant = [e["doc_id"] for e in epoch if text(e["targets"]) == "1"]
        assert sorted(relevant) == sorted(f"d{q}.{i}" for q in range(10) for i in (1, 3))
        for e in epoch:
            assert (text(e["targets"]) == "1") == (e["grade"] >= 2)
            assert e["doc_id"].startswith(f"d{e['query_id']}.")
            assert text(e["inputs"]) == f"Q: query {e['query_id']} D: passage {e['doc_id'][1:]} R:"


def test_queries_without_less_relevant_passages_are_skipped_with_a_warning(tmp_path, caplog):
    more = [{"qid": 77, "docid": i, "query": "query 77", "passage": str(i), "grade": 2 + i} for i in range(2)]
    path = write(tmp_path / "judged.jsonl", records(2) + more)
    options = {"relevance_level": 2, "held_out": 0}
    found = outputs(tasks.pairs({"train": path}, VOCABULARY, TEMPLATE, **options).pipeline("train", PAIRS, 0))
    assert collections.Counter(text(e["targets"]) for e in found) == {"1": 4, "0": 4}
    assert "1 queries whose passages are all relevant (77)" in caplog.text
    # Of a list, the passage of grade 2 is the less relevant one.
    found = outputs(tasks.lists({"train": path}, VOCABULARY, TEMPLATE, **options).pipeline("train", LISTS, 0))
    assert [e["grades"].tolist() for e in found if e["query_id"] == "77"] == [[3, 2, 0]]
    assert "1 relevant passages whose query has no less relevant ones" in caplog.text


def test_other_columns_are_other_data(tmp_path):
    (tmp_path / "a.tsv").write_text("who?\tHe.\t1\n")
    made = lambda *columns: JudgedDataSource({"train": str(tmp_path / "a.tsv")}, columns=columns).fingerprint("train")
    assert made("query", "passage", "label") == made("query", "passage", "label")
    assert made("query", "passage", "label") != made("passage", "query", "label")


def test_a_batch_of_pairs_is_neither_all_relevant_nor_all_irrelevant(judged):
    task = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=0)
    config = data.DatasetConfig(task, PAIRS, "train", 16, True, 0, num_workers=0)
    with data.train_loader(config, feature_converter=RankingFeatureConverter()) as loader:
        shares = [np.mean(next(loader)["decoder_target_tokens"][:, 0] == VOCABULARY.encode("1")[0]) for _ in range(6)]
    assert min(shares) > 0.2 and max(shares) < 0.8 and np.mean(shares) == pytest.approx(0.5)


def test_all_pairs_as_they_are(judged):
    task = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, negatives=None, held_out=0)
    assert [e["doc_id"] for e in outputs(task.pipeline("train", PAIRS, 0))] == [r["docid"] for r in records()]


def test_held_out_queries_are_validated_on_and_not_trained_on(judged, tmp_path):
    def queries(split: str, held_out, file=judged) -> set[str]:
        task = tasks.pairs({"train": file}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=held_out)
        data.TaskRegistry.remove("pairs")
        return {e["query_id"] for e in outputs(task.pipeline(split, PAIRS, 0))}

    held_out, trained = queries("validation", 0.3), queries("train", 0.3)
    assert len(held_out) == 3 and trained == {str(q) for q in range(10)} - held_out
    backwards = write(tmp_path / "backwards.jsonl", records()[::-1])
    assert queries("validation", 0.3, backwards) == held_out
    assert queries("validation", ["4", "7"]) == {"4", "7"}
    assert not queries("train", ["4", "7"]) & {"4", "7"}


def test_evaluation_measures_the_ranking_of_each_query(judged):
    task = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=0.3)
    converter = RankingFeatureConverter()
    evaluator = data.Evaluator(task, converter, "validation", sequence_length=PAIRS, batch_size=8)
    grades = {r["passage"]: r["grade"] for r in records()}
    given = lambda batch: [text(row).removesuffix(" R:").partition("D: ")[2] for row in batch["encoder_input_tokens"]]
    score = lambda sign: lambda batch: np.array([sign * grades.get(passage, 0) for passage in given(batch)])
    assert evaluator.evaluate(step=0, score_fn=score(1.0))["pairs"] == {"ndcg@10": 1.0, "mrr@10": 1.0}
    # Of six passages, those of grade 2 and 3 come last.
    assert evaluator.evaluate(step=0, score_fn=score(-1.0))["pairs"]["mrr@10"] == pytest.approx(1 / 5)


def test_candidates_are_sampled_as_irrelevant_unless_they_are_judged(judged, tmp_path):
    hits = [{"qid": 0, "docid": f"d0.{i}", "content": f"candidate {i}", "rank": i, "score": -i} for i in range(1, 40)]
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([{"query": "query 0", "hits": hits}, {"query": "x", "hits": [hits[0] | {"qid": 99}]}]))
    found = read_judgments(judged, candidates=str(path))
    assert len(found) == 10 and len(found["0"].passages) == 40
    assert found["0"].passages["d0.1"].text == "passage 0.1" and found["0"].passages["d0.1"].grade == 2
    assert found["0"].passages["d0.39"].grade is None
    task = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=0, candidates=str(path))
    pipeline = task.pipeline("train", PAIRS, 0)
    drawn = [e for epoch in range(300) for e in pipeline.outputs(epoch, 0) if text(e["targets"]) == "0"]
    assert {e["doc_id"] for e in drawn} > {"d0.39", "d0.0"} and all(e["grade"] < 2 for e in drawn)
    path.write_text(json.dumps([{"query": "x", "hits": [hits[0] | {"qid": 99}]}]))
    with pytest.raises(UserError, match="adds no passage to the queries 0, 1, 2, …: it has queries 99, …"):
        read_judgments(judged, candidates=str(path))


def test_qrels_judge_what_has_no_labels(tmp_path, caplog):
    bare = [{k: v for k, v in record.items() if k != "grade"} for record in records(2)]
    path, qrels = write(tmp_path / "pairs.jsonl", bare), tmp_path / "qrels"
    qrels.write_text("0 0 d0.4 2\n1 0 d1.0 0\n1 0 d1.9 1\n")
    found = read_judgments(path, qrels=qrels)
    assert found["0"].passages["d0.4"].grade == 2 and found["0"].passages["d0.1"].grade is None
    assert "1 of 3 judged pairs have no text" in caplog.text and "1 d1.9" in caplog.text
    with pytest.raises(UserError, match="adds no passage to the queries 0, 1, …: it has only passages that are there"):
        read_judgments(path, qrels=qrels, candidates=path)
    qrels.write_text("7 0 x 1\n")
    with pytest.raises(UserError, match=r"None of the 1 judged pairs .* \(7 x, …\) .* whose queries are 0, 1"):
        read_judgments(path, qrels=qrels)


def test_tables_without_names_and_texts_without_ids(tmp_path):
    (tmp_path / "a.csv").write_text('qtext,label,atext\nwho?,1,"He, or she."\nwho?,0,It.\n')
    found = read_judgments(tmp_path / "a.csv", fields={"query": "qtext", "passage": "atext"})
    assert [(p.doc_id, p.grade) for p in found["who?"].passages.values()] == [("He, or she.", 1), ("It.", 0)]
    (tmp_path / "b.tsv").write_text("7\twho?\tHe.\t1\n7\twho?\tHe.\t2\n")
    (query,) = read_judgments(tmp_path / "b.tsv", columns=["query_id", "query", "passage", "label"]).values()
    assert query.query_id == "7" and [p.grade for p in query.passages.values()] == [2]


def test_null_ids_count_as_missing(tmp_path):
    path = write(tmp_path / "judged.jsonl", [GOOD | {"qid": None, "docid": None}])
    (query,) = read_judgments(path).values()
    assert query.query_id == "who?" and list(query.passages) == ["He."]


def test_lists_have_a_relevant_passage_and_less_relevant_ones(judged):
    task = tasks.lists({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=0)
    pipeline = task.pipeline("train", LISTS, 0)
    assert len(pipeline) == 20
    epochs = [outputs(pipeline, epoch) for epoch in (0, 0, 1)]
    for one, same in zip(epochs[0], epochs[1], strict=True):
        np.testing.assert_array_equal(one["inputs"], same["inputs"])
    assert any((one["inputs"] != other["inputs"]).any() for one, other in zip(epochs[0], epochs[2], strict=True))
    grades = {r["passage"]: r["grade"] for r in records()}
    for made in epochs[0] + epochs[2]:
        shown = [text(row).removesuffix(" R:").partition("D: ")[2] for row in made["inputs"]]
        true = [grades[passage] for passage in shown]
        assert len(set(shown)) == 3 and true[0] >= 2 and max(true[1:]) < true[0]
        assert made["grades"].tolist() == [grade if grade >= 2 else 0 for grade in true]
        assert [text([i]) for i in made["targets"]] == ["1" if grade else "0" for grade in made["grades"]]


def test_a_list_longer_than_what_there_is_stays_shorter(judged):
    task = tasks.lists({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, held_out=0)
    lengths = {"inputs": 40, "targets": 8, "grades": 8}
    (made,) = task.pipeline("train", lengths, 0).outputs(0, 0)
    row = RankingFeatureConverter().convert_row([made], lengths)
    assert row["encoder_input_tokens"].shape == (8, 40)
    assert row["decoder_loss_weights"].tolist() == [1] * 5 + [0] * 3  # of grade 2, with the four that are below it
    assert (row["encoder_input_tokens"][5:, :2] == [VOCABULARY.eos_id, 0]).all()
    padding = RankingFeatureConverter().convert_row([], lengths)
    assert {name: array.shape for name, array in padding.items()} == {name: a.shape for name, a in row.items()}
    assert not any(array.any() for array in padding.values())


@pytest.mark.parametrize("as_lists", [False, True])
def test_triples(tmp_path, as_lists):
    (tmp_path / "triples.tsv").write_text("".join(f"query {i}\tgood {i}\tbad {i}\n" for i in range(8)))
    task = tasks.triples(
        {"train": str(tmp_path / "triples.tsv")}, VOCABULARY, TEMPLATE, as_lists=as_lists,
        columns=("query", "positive", "negative"),
    )  # fmt: skip
    found = outputs(task.pipeline("train", LISTS if as_lists else PAIRS, 0))
    if as_lists:
        assert [text(row) for row in found[3]["inputs"][:2]] == ["Q: query 3 D: good 3 R:", "Q: query 3 D: bad 3 R:"]
        assert found[3]["grades"].tolist() == [1, 0, 0] and found[3]["targets"][2] == 0
    else:
        said = sorted((text(e["inputs"]), text(e["targets"])) for e in found)
        assert said == sorted(
            (f"Q: query {i} D: {p} {i} R:", w) for i in range(8) for p, w in [("good", "1"), ("bad", "0")]
        )


def test_a_long_passage_is_cut_and_the_rest_stays(tmp_path):
    path = write(tmp_path / "long.jsonl", [{"query": "who?", "text": "word " * 50, "label": 1}])
    task = tasks.pairs({"test": path}, VOCABULARY, TEMPLATE, held_out=0)
    (made,) = outputs(task.pipeline("test", {"inputs": 30, "targets": 1}, 0))
    assert len(made["inputs"]) <= 30 and made["inputs"][-1] == VOCABULARY.eos_id and len(made["targets"]) == 1
    said = text(made["inputs"])
    assert said.startswith("Q: who? D: word") and said.endswith(" R:")


def test_a_template_with_one_word(judged):
    one = Template(text=TEMPLATE.text, relevant="1", irrelevant=None)
    pairs = tasks.pairs({"train": judged}, VOCABULARY, one, relevance_level=2).pipeline("validation", PAIRS, 0)
    lists = tasks.lists({"train": judged}, VOCABULARY, one, relevance_level=2).pipeline("train", LISTS, 0)
    assert {text(e["targets"]) for e in outputs(pairs)} == {"1"} and {e["grade"] for e in outputs(pairs)} == {
        0,
        1,
        2,
        3,
    }
    assert all(text(e["targets"]) == "111" and e["grades"][0] >= 2 for e in outputs(lists))


def test_a_mixture_of_tasks(judged):
    first = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE)
    second = tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2, name="other")
    assert tasks.pairs({"train": judged}, VOCABULARY, TEMPLATE) is first
    made = tasks.mixture([first, second], rates=[1.0, 3.0])
    assert tasks.mixture([first, second], rates=[1.0, 3.0]) is made and made.tasks == [first, second]
    with pytest.raises(UserError, match="2 tasks and 1 rates"):
        tasks.mixture([first, second], rates=[1.0])


GOOD = {"query": "who?", "passage": "He.", "label": 1}


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ([{"query": "who?", "body": "He."}], {}, r"judged.jsonl:1 has no field 'passage' or 'text' .* body"),
        ([GOOD], {"fields": {"passage": "body"}}, "has no field 'body' for the passage"),
        ([GOOD], {"fields": {"document": "passage"}}, "fields contains 'document'.*'query_id', 'query'"),
        ([GOOD, GOOD | {"label": "good"}], {}, r"judged.jsonl:2: the label 'label' is 'good'"),
        ([GOOD | {"label": 0.5}], {}, "it must be an integer"),
        ([GOOD | {"label": None}], {}, "it must be an integer"),
        ([GOOD | {"query": " "}], {}, 'judged.jsonl:1: "query" is empty'),
        ([GOOD | {"passage": ["He."]}], {}, "it must be a string"),
        ([GOOD | {"docid": 1.5}], {}, '"docid" is 1.5; an id must be a string or an integer'),
        ([GOOD | {"qid": 1}, GOOD | {"qid": 1, "query": "what?"}], {}, "query '1' is 'what\\?' here, but 'who\\?'"),
        ([GOOD | {"label": 0}], {}, "none of its 1 queries has a passage of grade 1 or more"),
        ([GOOD], {}, "no query has a passage that is less relevant"),
        (records(1), {"held_out": 0.5}, "leaves none of the 1 queries"),
        (records(2), {"held_out": ["5"]}, r"held_out has 1 query ids .*\(5\); its ids are 0, 1"),
        (records(2), {"held_out": 2}, "held_out is 2"),
        (records(2), {"relevance_level": 0}, "relevance_level is 0"),
        (records(2), {"candidates": {"run": "a"}}, "A run is given as"),
    ],
)  # fmt: skip
def test_invalid_judgments_raise_user_error(tmp_path, lines, options, words):
    path = write(tmp_path / "judged.jsonl", lines)
    with pytest.raises(UserError, match=words):
        task = tasks.pairs({"train": path}, VOCABULARY, TEMPLATE, **({"held_out": 0} | options))
        task.num_input_examples("train")


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ({"inputs": 40, "targets": 2}, "Lists of passages need .*'grades'"),
        ({"inputs": 40, "targets": 2, "grades": 3}, "Lists of passages need .*'grades'"),
        ({"inputs": 40, "targets": 1, "grades": 1}, "at least two passages"),
        ({"inputs": 9, "targets": 3, "grades": 3}, "leaves no room for a passage"),
    ],
)
def test_lengths_that_do_not_fit_lists(judged, lengths, words):
    task = tasks.lists({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2)
    with pytest.raises(UserError, match=words):
        task.pipeline("train", lengths, 0).outputs(0, 0)


def test_a_label_of_several_pieces(judged):
    task = tasks.pairs({"train": judged}, VOCABULARY, Template())
    with pytest.raises(UserError, match="'true' is not a single piece"):
        task.pipeline("train", PAIRS, 0).outputs(0, 0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
@pytest.mark.slow
def test_the_judgments_of_trec_deep_learning_2021():
    folder = SHARED / "msmarco_dl"
    found = read_judgments(folder / "judged_dl21.jsonl.gz", candidates=folder / "bm25_top100_dl21.json.gz")
    judged = [p.grade for query in found.values() for p in query.passages.values() if p.grade is not None]
    assert len(found) == 53 and collections.Counter(judged) == {0: 1082, 1: 1097, 2: 725, 3: 363}
    assert all(len(query.passages) >= 100 for query in found.values())


def test_lists_can_be_looked_at(judged, capsys):
    tasks.lists({"train": judged}, VOCABULARY, TEMPLATE, relevance_level=2)
    said = run(capsys, "data", "lists", "--lengths", "inputs=40,targets=3,grades=3", "-n", "1")
    assert said.code == 0, said.err
    assert "draw_list" in said.out and "rows and lengths are not measured" in said.out
