"""Answers of a tiny model: in Python, and by `t5x answer`."""

import dataclasses
import io
import json
import math
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from t5x import metrics
from t5x._runtime.errors import UserError
from t5x.apps.answering import answers
from t5x.apps.answering.answer_options import AnswerOptions
from t5x.apps.answering.answers import Answer
from t5x.apps.answering.spans import Span
from tests.apps.answering import squad_files
from tests.inference.models import texts
from tests.support.commands import run

QUESTION, CONTEXT = "c", " ".join(texts(12, seed=1))
OPTIONS = {"max_length": 8, "max_input_length": 64, "stride": 10}
FLAGS = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]


@pytest.fixture
def model(loaded_tiny_t5):
    return loaded_tiny_t5


@pytest.fixture(autouse=True)
def one_model(tiny_t5, model, monkeypatch):
    """Files are answered by the model that is loaded and compiled once; `--question` loads its own."""
    load = answers.load
    of = lambda path, **options: model if path == str(tiny_t5) else load(path, **options)
    monkeypatch.setattr(answers, "load", of)


def by_hand(model, question, context=CONTEXT):
    """What the model says of each window."""
    spans = answers.windows_of(model, question, context, AnswerOptions(**OPTIONS))
    prompts = [f"question: {question} context: {context[span.start : span.end]}" for span in spans]
    return spans, prompts, model.generate(prompts, max_length=8, max_input_length=64)


# --- In Python --------------------------------------------------------------------------------------------------------


def test_a_context_that_fits_is_asked_once(model):
    found = model.answer("ab", "ddcd hha", **OPTIONS)
    expected = model.generate("question: ab context: ddcd hha", max_length=8, max_input_length=64)
    assert (found.text, found.score) == (expected.text, pytest.approx(expected.score, rel=1e-4))
    assert not found.no_answer and found.no_answer_probability is None


def test_the_best_window_wins(model):
    spans, prompts, said = by_hand(model, QUESTION)
    assert len(spans) > 2 and all(len(prompt.encode()) + 1 <= 64 for prompt in prompts)
    assert len({one.text for one in said if one.text}) > 1
    best = max((one for one in said if one.text), key=lambda one: one.score)
    found = model.answer(QUESTION, CONTEXT, **OPTIONS)
    assert found.text == best.text and found.score == pytest.approx(best.score, rel=1e-4)


def test_lists_are_answered_one_by_one(model):
    questions, contexts = ["hg", "ab", "c"], [CONTEXT, "ddcd hha", "h"]
    found = model.answer(questions, contexts, **OPTIONS)
    for one, question, context in zip(found, questions, contexts, strict=True):
        alone = model.answer(question, context, **OPTIONS)
        assert one._replace(score=0) == alone._replace(score=0)
        assert one.score == pytest.approx(alone.score, rel=1e-4)
    assert [one.text for one in model.answer(["ab", "c"], "h", **OPTIONS)] == ["bbbbbbb", found[2].text]


def test_the_probability_of_no_answer_is_that_of_its_text(model):
    found = model.answer("ab", "ddcd hha", no_answer="none", **OPTIONS)
    expected = math.exp(model.score([("question: ab context: ddcd hha", "none")])[0])
    assert found.no_answer_probability == pytest.approx(expected, rel=1e-3)
    _, prompts, _ = by_hand(model, QUESTION)
    found = model.answer(QUESTION, CONTEXT, no_answer="a", **OPTIONS)
    expected = min(map(math.exp, model.score([(prompt, "a") for prompt in prompts], max_input_length=64)))
    assert found.no_answer_probability == pytest.approx(expected, rel=1e-3)


def test_a_window_without_an_answer_wins_only_where_all_say_so(model):
    _, _, said = by_hand(model, QUESTION)
    best = max((one for one in said if one.text), key=lambda one: one.score)
    others = [one for one in said if one.text not in ("", best.text)]
    found = model.answer(QUESTION, CONTEXT, no_answer=best.text, **OPTIONS)
    assert not found.no_answer and found.text == max(others, key=lambda one: one.score).text
    alone = model.generate("question: ab context: ddcd hha", max_length=8, max_input_length=64)
    found = model.answer("ab", "ddcd hha", no_answer=alone.text.upper(), **OPTIONS)
    assert found[0] == "" and found[2:5] == (None, None, True)
    assert found.score == pytest.approx(alone.score, rel=1e-4)


def told_model(said):
    """A stand-in that says what it is told of each window: {a word of the window: (text, score)}."""
    ids = lambda text, limit=None: (list(text.split()), len(text.split()))

    def predictions(inputs, decoding, **_):
        found = [next(value for word, value in said.items() if word in words) for words in inputs]
        return [[SimpleNamespace(text=text, score=score)] for text, score in found]

    vocabulary = SimpleNamespace(encode=list, decode=lambda made: re.sub("[<p]", " \u2047 ", "".join(made)))
    return SimpleNamespace(
        model=SimpleNamespace(output_vocabulary=vocabulary),
        input_ids=ids,
        target_ids=ids,
        predictions=predictions,
        scores=lambda inputs, targets, **_: [-1.0] * len(inputs),
    )


def test_the_place_is_looked_for_in_the_window_that_answered():
    context = "Alps one two three alps four five six"
    how = AnswerOptions(max_input_length=7, stride=0, no_answer="none")
    told = told_model({"one": ("none", -0.1), "alps": ("the Alps", -3.0), "five": ("alps", -0.2)})
    spans = answers.windows_of(told, "where", context, how)
    assert [context[span.start : span.end].split()[0] for span in spans] == ["Alps", "alps"]
    (found,) = answers.answer(told, [("where", context)], [spans], how)
    assert found == Answer("the Alps", -3.0, None, None, False, pytest.approx(math.exp(-1)))
    told = told_model({"one": ("none", -0.1), "alps": ("Alps", -3.0)})
    (found,) = answers.answer(told, [("where", context)], [spans], how)
    assert Span(found.start, found.end) == Span(19, 23)
    told = told_model({"one": ("none", -0.1), "alps": ("al\u2047s", -3.0)})
    (found,) = answers.answer(told, [("where", context)], [spans], how)
    assert (found.text, found.start) == ("alps", 19)
    told = told_model({"one": ("none", -0.1), "alps": ("a\u2047ps", -3.0)})
    (found,) = answers.answer(told, [("where", context)], [spans], how)
    assert found[:4] == ("a\u2047ps", -3.0, None, None)
    with pytest.raises(UserError, match=r"no_answer is '<none>'.*' \u2047 none>'"):
        answers.answer(told, [("where", context)], [spans], dataclasses.replace(how, no_answer="<none>"))


@pytest.mark.parametrize(
    ("question", "context", "options", "message"),
    [
        (" ", "x", {}, "the question is empty"),
        ("x", "", {}, "the context is empty"),
        ("x" * 60, "abc", {"max_input_length": 64}, "the question takes 81 of 64 input tokens. This leaves 0"),
        (
            "x" * 20,
            "abc " * 20,
            {"max_input_length": 64},
            "leaves 23 for a window of the context, too few for a stride of 128",
        ),
        (["x", "y"], ["z"], {}, r"2 question\(s\) but 1 context\(s\)"),
        ("x", "y", {"stride": -1}, "stride is -1"),
        ("x", "y", {"beams": 0}, "beams is 0"),
        ("x", "y", {"no_answer": " "}, "no_answer is empty"),
    ],
)
def test_invalid_questions_and_options_raise_user_errors(model, question, context, options, message):
    with pytest.raises(UserError, match=message):
        model.answer(question, context, **options)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_question(capsys, tiny_t5, model):
    expected = model.answer("ab", "ddcd hha", no_answer="none", **OPTIONS)
    arguments = ("--model", tiny_t5, "--question", "ab", "--context", "ddcd hha", *FLAGS)
    said = run(capsys, "answer", *arguments)
    assert said.code == 0 and said.out == f"{expected.text}\n", said.err
    found = json.loads(run(capsys, "answer", *arguments, "--json", "--no_answer", "none").out)
    assert found["answer"] == expected.text and found["score"] == pytest.approx(expected.score, rel=1e-4)
    assert (found["start"], found["end"], found["no_answer"]) == expected[2:5]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def questions(tmp_path):
    """Forty of them, about short and long contexts."""
    rows = [
        {"id": i, "question": text or "x", "context": CONTEXT[: 30 + 9 * (i % 7)]} for i, text in enumerate(texts(40))
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row | {"more": True}) + "\n" for row in rows))
    return path


def test_an_interrupted_file_resumes_to_the_same_bytes(capsys, tiny_t5, model, questions, tmp_path, monkeypatch):
    arguments = ("--model", tiny_t5, "--input", questions, *FLAGS, "--batch_size", 8, "--checkpoint_period", 1)
    whole = tmp_path / "whole.jsonl"
    said = run(capsys, "answer", *arguments, "--output", whole)
    assert said.code == 0, said.err
    found = lines_of(whole)
    assert [row["id"] for row in found] == list(range(40)) and all(row["more"] for row in found)
    for row in found[::13]:
        expected = model.answer(row["question"], row["context"], **OPTIONS)
        assert (row["answer"], row["start"], row["end"]) == (expected.text, expected.start, expected.end)
        assert row["score"] == pytest.approx(expected.score, rel=1e-4)

    compute, calls = answers._FileAnswering.compute, []

    def stopped(self, chunk, progress):
        calls.append(len(chunk.lines))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return compute(self, chunk, progress)

    monkeypatch.setattr(answers._FileAnswering, "compute", stopped)
    output, predictions = tmp_path / "out.jsonl", tmp_path / "predictions.json"
    again = (*arguments, "--output", output, "--squad_predictions", predictions)
    assert run(capsys, "answer", *again).code == 75
    assert not output.exists() and not predictions.exists()
    run(capsys, "answer", *arguments, "--output", output, "--beams", 2).refused("beams was 1, is 2")
    assert run(capsys, "answer", *again).code == 0
    assert calls == [8] * 6  # two chunks, one that was stopped, and the three that were left
    assert output.read_bytes() == whole.read_bytes()
    assert json.loads(predictions.read_text()) == {str(row["id"]): row["answer"] for row in found}
    run(capsys, "answer", *again).refused("out.jsonl exists already", "--overwrite")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp-")] == []

    # Stopped between its last steps: the output is there, what is made of it is not.
    monkeypatch.setattr(answers._FileAnswering, "after_merge", lambda *args: signal.raise_signal(signal.SIGTERM))
    assert run(capsys, "answer", *again, "--overwrite").code == 75
    monkeypatch.undo()
    predictions.unlink()
    assert run(capsys, "answer", *again).code == 0
    assert output.read_bytes() == whole.read_bytes() and len(json.loads(predictions.read_text())) == 40


def test_an_input_that_has_changed_is_refused(capsys, tiny_t5, questions, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    given = ("--model", tiny_t5, "--input", questions, "--output", output, *FLAGS, "--batch_size", 8)
    given = (*given, "--checkpoint_period", 1)
    lines = questions.read_text().splitlines(keepends=True)
    with monkeypatch.context() as patched:
        patched.setattr("t5x.inference.output.merge", lambda *args: signal.raise_signal(signal.SIGTERM))
        assert run(capsys, "answer", *given).code == 75
    questions.write_text("".join(lines[:16]))
    run(capsys, "answer", *given).refused("in.jsonl has changed: it ends before the lines", "--overwrite")
    questions.write_text("".join([*lines[:8], *lines[9:17]]))
    run(capsys, "answer", *given).refused("in.jsonl has changed: lines 9 to 16 ", "--overwrite")
    assert run(capsys, "answer", *given, "--overwrite").code == 0
    assert [row["id"] for row in lines_of(output)] == [*range(8), *range(9, 17)]


def test_squad_s_files(capsys, tiny_t5, tmp_path):
    data = squad_files.write(tmp_path / "dev.json", squad_files.version_2())
    output, predictions, na_probs = (tmp_path / name for name in ("out.jsonl", "predictions.json", "na.json"))
    said = run(
        capsys, "answer", "--model", tiny_t5, "--input", data, "--output", output, "--squad_predictions", predictions,
        "--squad_na_probs", na_probs, "--no_answer", "none", "--max_length", 8, "--max_input_length", 64, "--stride", 0,
    )  # fmt: skip
    assert said.code == 0, said.err
    records = {record["id"]: record for record in lines_of(output)}
    assert list(records) == ["q0", "q1", "q2", "q3"]
    assert json.loads(predictions.read_text()) == {name: record["answer"] for name, record in records.items()}
    probabilities = json.loads(na_probs.read_text())
    assert probabilities == {name: record["no_answer_probability"] for name, record in records.items()}
    assert all(0 <= value <= 1 for value in probabilities.values())
    golds = [["Theodor Fontane", "Fontane"], ["1895"], [], ["in the Alps", "the Alps"]]
    scores = metrics.squad_v2(golds, [r["answer"] for r in records.values()], list(probabilities.values()))
    assert f"em {scores['em']:.4g}, f1 {scores['f1']:.4g}" in said.err and "best_f1_threshold" in said.err


def test_standard_input(capsys, tiny_t5, model, monkeypatch):
    given = json.dumps({"question": "ab", "context": "ddcd hha"}) + "\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given.encode())))
    said = run(capsys, "answer", "--model", tiny_t5, "--input", "-", *FLAGS)
    assert json.loads(said.out)["answer"] == model.answer("ab", "ddcd hha", **OPTIONS).text


GOOD = '{"id": 1, "question": "ab", "context": "fed"}\n'
BAD = {
    "broken JSON": (GOOD + '{"question": \n', ["in.jsonl:2 is not JSON"]),
    "no context": (GOOD + '{"question": "x"}\n', ["in.jsonl:2 has no string 'context'"]),
    "a list": ("[1]\n", ["in.jsonl:1 must be an object"]),
    "an empty question": ('{"question": " ", "context": "x"}\n', ["in.jsonl:1 has an empty 'question'"]),
    "an id twice": (GOOD + "\n" + GOOD, ["in.jsonl:3 has the same id, 1, as line 1"]),
    "an id that is none": (GOOD.replace("1", "[1]"), ['"id" must be a string']),
    "a long question": (GOOD.replace("ab", "x" * 70), ["in.jsonl:1: the question takes 91 of 64 input tokens"]),
    "half a character": (GOOD.replace("ab", "\\ud800"), ["in.jsonl:1", "surrogate"]),
    "half a character in an id": (GOOD.replace("1", '"\\ud800"'), ['in.jsonl:1: "id" has half of a surrogate pair']),
    "the output's answer": (
        GOOD.replace("{", '{"answers": [], "answer": "x", '),
        [':1 has a field "answer"', "Rename"],
    ),
    "the output's score": (GOOD.replace("{", '{"score": 1, '), ['in.jsonl:1 has a field "score"']),
    "a field that the output may have": (GOOD.replace("{", '{"no_answer_probability": null, '), ["Rename it"]),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_lines_raise_user_errors_with_their_place(case, capsys, tiny_t5, tmp_path):
    content, words = BAD[case]
    (tmp_path / "in.jsonl").write_text(content)
    output = tmp_path / "out.jsonl"
    run(capsys, "answer", "--model", tiny_t5, "--input", tmp_path / "in.jsonl", "--output", output, *FLAGS).refused(
        *words
    )
    assert not output.exists()


def test_lines_are_checked_before_the_model_is_loaded(capsys, tmp_path):
    (tmp_path / "in.jsonl").write_text(BAD["broken JSON"][0])
    options = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", *FLAGS)
    run(capsys, "answer", "--model", tmp_path / "absent", *options).refused("in.jsonl:2 is not JSON")


def test_options_that_do_not_go_together(capsys, tiny_t5, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "ab", "context": "fed"}\n')
    (tmp_path / "there").write_text("")
    model, given = ("--model", tiny_t5), ("--input", tmp_path / "in.jsonl")
    refused = lambda *words, args: run(capsys, "answer", *model, *args).refused(*words)
    refused("--question and --context, or --input", args=["--question", "x"])
    refused("--json cannot be used with --input", args=[*given, "--json"])
    refused("--output can only be used with --input", args=["--question", "x", "--context", "y", "--output", "z"])
    refused("--squad_predictions needs --output", args=[*given, "--squad_predictions", "p"])
    refused("must be different files", args=[*given, "--output", "p", "--squad_predictions", "p"])
    refused("needs --no_answer", args=[*given, "--output", "o", "--squad_na_probs", "p"])
    refused('has no "id"', args=[*given, "--output", tmp_path / "o", "--squad_predictions", tmp_path / "p"])
    refused("there exists already", args=[*given, "--output", tmp_path / "there"])
    refused(f"{tmp_path}/x", args=[*given, "--output", tmp_path / "o", "--squad_predictions", tmp_path / "x/p"])
    refused("stride is -1", args=[*given, "--stride", -1])
    refused("There is no file", args=["--input", tmp_path / "missing.json"])
