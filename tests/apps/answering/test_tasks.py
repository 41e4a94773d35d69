"""SQuAD's files and closed-book questions as tasks."""

import gzip
import json
import pickle
import zipfile

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.apps import answering
from t5x.data.evaluator import Evaluator
from t5x.data.feature_converters import EncDecFeatureConverter
from tests.apps.answering import squad_files
from tests.support.paths import SHARED

SQUAD, SPIECE = SHARED / "squad_dev_v1.1/dev-v1.1.json.zip", SHARED / "t5_vocab/spiece.model"
VOCABULARY = data.ByteVocabulary()
LENGTHS = {"inputs": 128, "targets": 32}


@pytest.fixture(autouse=True)
def no_tasks_stay():
    yield
    for name in ("squad", "nq_open"):
        if name in data.TaskRegistry.names():
            data.TaskRegistry.remove(name)


@pytest.fixture
def version_2(tmp_path):
    return squad_files.write(tmp_path / "dev-v2.0.json", squad_files.version_2())


def examples(task, split="validation"):
    pipeline = task.pipeline(split, LENGTHS)
    return [example for index in range(len(pipeline)) for example in pipeline.outputs(0, index)]


def test_squad_2(version_2):
    told = {"files": {"validation": version_2}, "vocabulary": VOCABULARY, "no_answer": "unanswerable"}
    task = answering.squad_task(**told)
    assert answering.squad_task(**told) is task
    made = examples(task)
    assert [(e["inputs_pretokenized"], e["targets_pretokenized"]) for e in made] == [
        (f"question: Who wrote it? context: {squad_files.FONTANE}", "Theodor Fontane"),
        (f"question: When did it appear? context: {squad_files.FONTANE}", "1895"),
        (f"question: Who filmed it? context: {squad_files.FONTANE}", "unanswerable"),
        (f"question: Where does it rise? context: {squad_files.RHINE}", "in the Alps"),
    ]
    assert VOCABULARY.decode(made[1]["targets"]) == "1895"
    assert [e["answers"] for e in made] == [["Theodor Fontane", "Fontane"], ["1895"], [], ["in the Alps", "the Alps"]]


def evaluated(task, predictions):
    """What the task's evaluation says of predictions, by the order of its questions."""
    evaluator = Evaluator(task, EncDecFeatureConverter(), sequence_length=LENGTHS, batch_size=len(predictions))
    ids = np.zeros((len(predictions), 32), np.int32)
    for row, text in zip(ids, predictions, strict=True):
        encoded = [*VOCABULARY.encode(text), 1]
        row[: len(encoded)] = encoded
    return evaluator.evaluate(step=0, predict_fn=lambda batch: ids)[task.name]


def test_squad_2_is_evaluated_by_its_rules(version_2):
    task = answering.squad_task({"validation": version_2}, VOCABULARY, no_answer="unanswerable")
    found = evaluated(task, ["fontane", "unanswerable", "Unanswerable", "The Alps."])
    expected = {"em": 75, "f1": 75, "HasAns_em": 200 / 3, "HasAns_f1": 200 / 3, "NoAns_em": 100, "NoAns_f1": 100}
    assert found == pytest.approx(expected)


def test_squad_1_takes_the_best_of_all_answers(tmp_path):
    path = squad_files.write(tmp_path / "dev.json", squad_files.version_1())
    task = answering.squad_task({"validation": path}, VOCABULARY)
    assert len(examples(task)) == 3
    found = evaluated(task, ["fontane", "in 1895", "the lake"])
    assert found == pytest.approx({"em": 100 / 3, "f1": (100 + 200 / 3) / 3})


def test_articles_are_parted_by_their_titles(tmp_path):
    path = tmp_path / "all.json.gz"
    path.write_bytes(gzip.compress(json.dumps(squad_files.version_1()).encode()))
    source = answering.SquadDataSource(
        {"train": str(path), "validation": str(path)}, {"train": "[A-M]", "validation": "[^A-M]"}
    )
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert [one.num_examples(split) for split in one.splits] == [2, 1]
        assert one.example("validation", 0)["title"] == "Rhine"
        assert one.location("validation", 0).endswith("all.json.gz, question 'q3'")
    assert source.fingerprint("train") != answering.SquadDataSource({"train": str(path)}).fingerprint("train")
    titles = {"train": "[A-M]", "validation": "[^A-M]"}
    assert answering.SquadDataSource({"validation": str(path)}, titles).num_examples("validation") == 1
    with pytest.raises(UserError, match=r"all.json.gz: no title begins with 'X'. The titles are Effi_Briest, Rhine\."):
        answering.SquadDataSource({"train": str(path)}, {"train": "X"}).num_examples("train")


@pytest.mark.skipif(not SQUAD.is_file(), reason="SQuAD (../shared/data/squad_dev_v1.1) is not here")
def test_the_official_file(tmp_path):
    with zipfile.ZipFile(SQUAD) as archive:
        archive.extract("dev-v1.1.json", tmp_path)
    path = str(tmp_path / "dev-v1.1.json")
    task = answering.squad_task(
        {"train": path, "validation": path}, VOCABULARY, titles={"train": "[A-M]", "validation": "[^A-M]"}
    )
    sizes = [task.num_input_examples(split) for split in task.splits]
    assert sum(sizes) == 10570 and min(sizes) > 4000
    first = task.source.example("validation", 0)
    assert first["title"] == "Super_Bowl_50" and first["answers"] == ["Denver Broncos"] * 3


def test_a_question_without_an_answer_needs_a_text_for_it(version_2):
    task = answering.squad_task({"validation": version_2}, VOCABULARY)
    with pytest.raises(UserError, match=r"question 'q2'.*no_answer='unanswerable'"):
        examples(task)


@pytest.mark.skipif(not SPIECE.is_file(), reason="T5's vocabulary (../shared/data/t5_vocab) is not here")
def test_a_no_answer_text_that_the_vocabulary_cannot_encode_is_refused(version_2):
    vocabulary = data.SentencePieceVocabulary(str(SPIECE), extra_ids=100)
    for text in ("<no answer>", "{none}", "~none"):
        with pytest.raises(UserError, match=r"which the model cannot generate: .*' \u2047 no"):
            answering.squad_task({"validation": version_2}, vocabulary, no_answer=text)
    answering.squad_task({"validation": version_2}, vocabulary, no_answer=" No  answer ")


def changed(change):
    content = squad_files.version_2()
    paragraph = content["data"][0]["paragraphs"][0]
    change(paragraph, paragraph["qas"])
    return content


BAD = {
    "broken JSON": ('{"data": [\n  {"title": "A" "x"}]}', r"dev\.json is not JSON: .* line 2 column"),
    "JSON lines": ('{"question": "a"}\n{"question": "b"}\n', "Extra data: .* rename it to .jsonl"),
    "something else": ([1, 2], "the file has no list 'data'"),
    "a number of many digits": ('{"data": [' + "1" * 5000 + "]}", r"dev\.json is not JSON: .*4300 digits"),
    "half a character": (
        changed(lambda p, qas: qas[1].update(id="q\ud800")), r"qas\[1\], 'id', has half of a surrogate pair .* 2"
    ),
    "no paragraphs": ({"data": [{"title": "A"}]}, r"data\[0\] has no list 'paragraphs'"),
    "no context": (changed(lambda p, qas: p.pop("context")), r"data\[0\].paragraphs\[0\] has no string 'context'"),
    "no question": (changed(lambda p, qas: qas[1].pop("question")), r"\.qas\[1\] has no string 'question'"),
    "an empty question": (changed(lambda p, qas: qas[1].update(question=" ")), r"qas\[1\] has an empty 'question'"),
    "no id": (changed(lambda p, qas: qas[0].pop("id")), r"qas\[0\] has no string 'id'"),
    "an id twice": (changed(lambda p, qas: qas[1].update(id="q0")), r"qas\[0\] and .*qas\[1\] have the same id, 'q0'"),
    "a wrong place": (
        changed(lambda p, qas: qas[1]["answers"][0].update(answer_start=3)),
        r"qas\[1\].answers\[0\] is '1895' at answer_start 3, but there the context has 'i Br'",
    ),
    "a place that is none": (
        changed(lambda p, qas: qas[1]["answers"][0].update(answer_start="3")),
        r"answers\[0\] is '1895' at answer_start '3'",
    ),
    "an answer without text": (
        changed(lambda p, qas: qas[1]["answers"][0].pop("text")), r"answers\[0\] has no string 'text'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_file_raises_a_user_error(case, tmp_path):
    content, message = BAD[case]
    with pytest.raises(UserError, match=message) as told:
        answering.read_squad(squad_files.write(tmp_path / "dev.json", content))
    assert "dev.json" in str(told.value)


def test_closed_book(tmp_path):
    path = tmp_path / "nq.jsonl"
    rows = [("who wrote effi briest", ["Theodor Fontane", "Fontane"]), ("where is it", ["Kessin"])]
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    task = answering.closed_book_task({"validation": str(path)}, VOCABULARY)
    made = examples(task)
    assert made[0]["inputs_pretokenized"] == "nq question: who wrote effi briest"
    assert made[0]["targets_pretokenized"] == "Theodor Fontane"
    assert evaluated(task, ["fontane!", "in Kessin"]) == pytest.approx({"em": 50, "f1": (100 + 200 / 3) / 2})


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"question": "q"}', '"answer" must be a list'), ('{"question": "q", "answer": []}', '"answer" must be a list'),
     ('{"answer": ["a"]}', '"question" must be')],
)  # fmt: skip
def test_invalid_closed_book_lines_raise_user_errors(line, message, tmp_path):
    path = tmp_path / "nq.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=f"nq.jsonl:1.*{message}"):
        examples(answering.closed_book_task({"validation": str(path)}, VOCABULARY))
