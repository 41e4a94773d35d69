"""TFDS data sets: the real package writes them, and reads them too, in the environment that has it."""

import json
import os
import sys
from pathlib import Path

import pytest

from t5x._runtime.errors import UserError
from t5x.data import TfdsDataSource
from tests.support.programs import once_for_all_workers, run_reference

PROGRAM = Path(__file__).parent / "programs/tfds_source.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What TFDS and our source say of the same data sets: see programs/tfds_source.py."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(directory):
        done = run_reference(PROGRAM, directory / "data", directory / "results.json")
        assert done.returncode == 0, done.stderr[-3000:]

    return json.loads((once_for_all_workers(base / "tfds_source", make) / "results.json").read_text())


@pytest.mark.parametrize("name", ["letters", "plain_letters"])  # array_record, TFRecord
@pytest.mark.slow
def test_examples_are_those_of_tfds(results, name):
    expected, found = results["expected"][name], results["found"][name]
    assert {split: len(examples) for split, examples in expected.items()} == {
        "train": 20, "test": 3, "head": 3, "tail": 8, "both": 18,
    }  # fmt: skip
    for split, examples in expected.items():
        assert found[split] == examples, split
    assert {example["text"] for example in found["train"]} == {f"ä{i}" for i in range(20)}
    assert any(example["answers"] == {"text": ["x0"], "start": [0]} for example in found["train"])


def test_examples_know_where_they_are(results):
    # Shards of 7, 6 and 7 records; train[60%:] begins with example 12.
    place = results["found"]["letters"]["location"]
    assert place.endswith("letters/1.0.0/letters-train.array_record-00001-of-00003, record 6")


def test_data_sets_that_cannot_be_used(results):
    refused = results["found"]["refused"]
    assert "Dataset other not found." in refused["name"]
    assert "`tfds build other`" in refused["name"]
    assert "`tfds build ag_news_subset" in refused["unprepared"]
    assert all(word in refused["split"] for word in ("letters", "'dev'", "train, test"))
    assert "riegeli" in refused["format"]
    assert "--file_format=array_record" in refused["format"]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install tensorflow-datasets`, or `pip install -e '\.\[tfds\]'`"):
        TfdsDataSource("glue/mrpc")
