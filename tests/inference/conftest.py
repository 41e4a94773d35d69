"""Runs of `infer`, `answer` and `rerank`, which write their results in the same way, with one tiny model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from t5x.apps.answering import answers
from t5x.apps.ranking import rerank_job
from t5x.cli import file_inference
from t5x.inference import loaded
from tests.inference.models import byte_model, texts
from tests.support import commands

# Six inputs of about one length, in chunks of two.
VERBS = {
    "infer": (file_inference, "in.txt", ["--max_length=4", "--max_input_length=40"]),
    "answer": (answers, "questions.jsonl", ["--max_length=4", "--max_input_length=40", "--stride=1"]),
    "rerank": (
        rerank_job,
        "pairs.tsv",
        ["--max_length=40", "--labels=a,b", "--template={query} {document}", "--format=jsonl"],
    ),
}


@pytest.fixture(scope="module")
def verb_inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("place")
    byte_model(directory / "model")
    inputs = [f"{text:a<7}"[:7] for text in texts(6)]
    (directory / "in.txt").write_text("".join(f"{text}\n" for text in inputs))
    (directory / "pairs.tsv").write_text("".join(f"a\t{text}\n" for text in inputs))
    questions = [{"question": "ab", "context": text} for text in inputs]
    (directory / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return directory


@pytest.fixture(scope="module")
def verb_model(verb_inputs):
    """Loaded and compiled once."""
    return loaded.load(str(verb_inputs / "model"))


@pytest.fixture
def run_verb(verb_inputs, verb_model, monkeypatch, capsys) -> Callable[..., commands.Result]:
    """`run_verb(verb, output, *more)` runs a verb of VERBS over six inputs."""

    def run(verb: str, output: Path, *more: str) -> commands.Result:
        module, name, options = VERBS[verb]
        monkeypatch.setattr(module, "load", lambda *args, **kwargs: verb_model)
        given = [f"--model={verb_inputs / 'model'}", f"--input={verb_inputs / name}", f"--output={output}"]
        return commands.run(capsys, verb, *given, *options, "--batch_size=2", "--checkpoint_period=1", *more)

    return run
