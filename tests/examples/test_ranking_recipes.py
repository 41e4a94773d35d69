"""The recipes of rankers: whole configurations, whose tasks read the published files."""

import gzip
import json
import zipfile

import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.apps.ranking.templates import Template
from t5x.data.tasks import task_rates
from t5x.examples.recipes import ranking
from tests.support.commands import run

TEMPLATE = Template(relevant="1", irrelevant="0")
VOCABULARY = data.ByteVocabulary()


@pytest.fixture
def directory(tmp_path):
    msmarco, trecqa, squad = (tmp_path / name for name in ("msmarco_dl", "trecqa_wang", "squad_dev_v1.1"))
    for folder in (msmarco, trecqa, squad):
        folder.mkdir()
    judged = [
        {"qid": str(q), "docid": f"{q}.{grade}", "query": f"query {q}", "passage": f"of {grade}", "grade": grade}
        for q in range(5)
        for grade in range(4)
    ]

    (msmarco / "judged_dl21.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, judged)).encode()))
    hits = [{"qid": 0, "docid": "other", "content": "unjudged", "score": 1.0, "rank": 1}]
    (msmarco / "bm25_top100_dl21.json.gz").write_bytes(
        gzip.compress(json.dumps([{"query": "query 0", "hits": hits}]).encode())
    )
    for name in ("train", "dev"):
        (trecqa / f"{name}.csv").write_text("qtext,label,atext\nWho ?,1,He .\nWho ?,0,It .\n")
    paragraphs = [
        {"context": f"Paragraph {i}.", "qas": [{"id": f"{i}{j}", "question": f"Question {i}{j}?"} for j in "ab"]}
        for i in range(3)
    ]
    with zipfile.ZipFile(squad / "dev-v1.1.json.zip", "w") as archive:
        archive.writestr("dev-v1.1.json", json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]}))
    before = {*data.MixtureRegistry.names(), *data.TaskRegistry.names()}
    yield str(tmp_path)
    for registry in (data.MixtureRegistry, data.TaskRegistry):
        for name in {*registry.names()} - before:
            registry.remove(name)


def test_training_examples_of_rankers(directory):
    mixture = ranking.pairs(directory, VOCABULARY, TEMPLATE)
    assert ranking.pairs(directory, VOCABULARY, TEMPLATE) is mixture
    rates = {task.name: (rate, task.num_input_examples("train")) for task, rate in task_rates(mixture).items()}
    # Of four queries that are not held out, the two passages of grades 2 and 3 each; a question for each of SQuAD's.
    assert rates == {"dl21_pairs": (1.0, 8), "trecqa_pairs": (0.5, 1), "squad_pairs": (2.0, 6)}
    squad = data.get_mixture_or_task("squad_pairs").pipeline("train", {"inputs": 99, "targets": 2}, 0)
    said = {e["targets_pretokenized"]: e["inputs_pretokenized"] for e in squad.outputs(0, 3)}
    assert said["1"] == "Query: Question 1b? Document: Paragraph 1. Relevant:"
    assert said["0"] in {f"Query: Question 1b? Document: Paragraph {i}. Relevant:" for i in (0, 2)}
    lists = ranking.lists(directory, VOCABULARY, TEMPLATE, parts=("dl21", "squad"))
    assert [task.name for task in lists.tasks] == ["dl21_lists", "squad_lists"]
    with pytest.raises(UserError, match=r"'dl19'.*'dl21'"):
        ranking.pairs(directory, VOCABULARY, TEMPLATE, parts=("dl19",))


@pytest.mark.parametrize(("recipe", "words"), [("monot5", "'vocabulary'"), ("rankt5", "'listwise'")])
def test_they_are_whole_configurations(capsys, recipe, words):
    said = run(
        capsys, "train", f"--gin_file=t5x/examples/recipes/{recipe}.gin", "--gin.MODEL_DIR=run", "--gin.DATA_DIR=data",
        "--gin.INITIAL_CHECKPOINT_PATH=flan", "--dry_run",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert f"LOSS = {words}" in said.out and "('dl21_pairs', 'ndcg@10')" in said.out
