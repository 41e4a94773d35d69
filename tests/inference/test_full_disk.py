"""What writes results when the disk is full: one message, nothing lost, and the next run goes on."""

import json

import pytest

from t5x.answering import files as answering_files
from t5x.inference import files, loaded
from t5x.inference.output import Output
from t5x.ranking import reranking
from tests import commands
from tests.disks import fill
from tests.inference.models import byte_model, texts

# Six inputs of about one length, in chunks of two.
VERBS = {
    "infer": (files, "in.txt", ["--max_length=4", "--max_input_length=40"]),
    "answer": (answering_files, "questions.jsonl", ["--max_length=4", "--max_input_length=40", "--stride=1"]),
    "rerank": (
        reranking,
        "pairs.tsv",
        ["--max_length=40", "--labels=a,b", "--template={query} {document}", "--format=jsonl"],
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("place")
    byte_model(directory / "model")
    inputs = [f"{text:a<7}"[:7] for text in texts(6)]
    (directory / "in.txt").write_text("".join(f"{text}\n" for text in inputs))
    (directory / "pairs.tsv").write_text("".join(f"a\t{text}\n" for text in inputs))
    questions = [{"question": "ab", "context": text} for text in inputs]
    (directory / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return directory


@pytest.fixture(scope="module")
def model(place):
    """Loaded and compiled once."""
    return loaded.load(str(place / "model"))


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_told_and_the_next_run_goes_on(verb, place, model, small_disk, tmp_path, monkeypatch, capsys):
    module, name, options = VERBS[verb]
    monkeypatch.setattr(module, "load", lambda *args, **kwargs: model)
    batches = ["--batch_size=2", "--checkpoint_period=1"]
    run = lambda output: commands.run(
        capsys, verb, f"--model={place / 'model'}", f"--input={place / name}", *options, *batches, f"--output={output}"
    )
    assert run(tmp_path / "whole").code == 0
    output, write = small_disk / "out", Output.write

    def fills_the_disk(self, lines, record):
        if self._chunks.finished:
            fill(small_disk)
        write(self, lines, record)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", fills_the_disk)
        run(output).refused("tmp-out/out-chunk00001 cannot be written: No space left on device", "start again")
    assert not output.exists()
    (small_disk / "filler").unlink()
    again = run(output)
    assert again.code == 0 and "going on behind 1 finished chunk(s)" in again.err
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert [path.name for path in small_disk.iterdir()] == ["out"]
