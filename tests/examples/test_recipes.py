"""The recipes: their tasks read the published files, and their gin files are whole."""

import pytest

from t5x import data
from t5x.examples.recipes import tasks
from tests.commands import run


@pytest.fixture
def sst2(tmp_path):
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.tsv").write_text("1\ta stirring film\n0\tno yuks , not much of anything .\n")
    yield tmp_path
    data.TaskRegistry.remove("sst2")


def test_sst2(sst2):
    task = tasks.sst2(str(sst2), data.ByteVocabulary())
    assert tasks.sst2(str(sst2), data.ByteVocabulary()) is task
    assert task.splits == ("train", "validation", "test")
    pipeline = task.pipeline("validation", {"inputs": 96, "targets": 16}, 0)
    texts = [(e["inputs_pretokenized"], e["targets_pretokenized"]) for i in (0, 1) for e in pipeline.outputs(0, i)]
    assert texts == [
        ("sst2 sentence: a stirring film", "positive"),
        ("sst2 sentence: no yuks , not much of anything .", "negative"),
    ]


def test_sst2_is_a_whole_configuration(capsys):
    said = run(
        capsys, "train", "--gin_file=t5x/examples/recipes/sst2.gin", "--gin.MODEL_DIR=run", "--gin.DATA_DIR=sst2",
        "--gin.INITIAL_CHECKPOINT_PATH=flan", "--dry_run",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "tasks.sst2" in said.out and "0.0005" in said.out
