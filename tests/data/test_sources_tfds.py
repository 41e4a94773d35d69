"""TFDS data sets. The package is not installed here: what is used of it is played by a few objects."""

import pickle
import sys
import types

import numpy as np
import pytest

from t5x.data import TfdsDataSource
from t5x.errors import UserError
from tests.data.test_sources_records import record


class Text:
    pass


class Sequence:
    def __init__(self, feature):
        self.feature = feature


class Features(dict):
    def deserialize_example_np(self, content):
        number = int(content)
        return {
            "text": f"ä{number}".encode(),
            "label": number,
            "raw": b"\xff",
            "translation": {"de": b"ein", "en": b"one"},
            "words": np.array([b"a", "ö".encode()], object),
            "answers": {"text": [b"x"], "start": [1]},
        }


FEATURES = Features(
    text=Text(), label=object(), raw=object(), translation={"de": Text(), "en": Text()}, words=Sequence(Text()),
    answers=Sequence({"text": Text(), "start": object()}),
)  # fmt: skip


class Splits(dict):
    """Two files of three records; `train[2:]` is written as TFDS would: parts of files."""

    def __init__(self, directory):
        def part(file, skip, take):
            return types.SimpleNamespace(filename=directory / f"x.tfrecord-{file}", skip=skip, take=take)

        super().__init__(
            train=types.SimpleNamespace(file_instructions=[part(0, 0, -1), part(1, 0, -1)]),
            **{"train[2:]": types.SimpleNamespace(file_instructions=[part(0, 2, -1), part(1, 0, 1)])},
        )

    def __iter__(self):
        return iter(["train"])


@pytest.fixture
def builder(tmp_path, monkeypatch):
    for file in range(2):
        content = b"".join(record(str(3 * file + i).encode()) for i in range(3))
        (tmp_path / f"x.tfrecord-{file}").write_bytes(content)
    info = types.SimpleNamespace(
        splits=Splits(tmp_path), features=FEATURES, file_format=types.SimpleNamespace(value="tfrecord")
    )
    builder = types.SimpleNamespace(info=info, data_dir=str(tmp_path))

    def find(name, data_dir=None):
        if name != "mine/one:1.0.0":
            raise LookupError(f"Dataset {name} not found.")
        return builder

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", types.SimpleNamespace(builder=find))
    return builder


def test_examples_with_their_texts(builder, tmp_path):
    source = TfdsDataSource("mine/one:1.0.0")
    assert source.splits == ("train",)
    assert source.num_examples("train") == 6
    assert source.example("train", 4) == {
        "text": "ä4", "label": 4, "raw": b"\xff", "translation": {"de": "ein", "en": "one"}, "words": ["a", "ö"],
        "answers": {"text": ["x"], "start": [1]},
    }  # fmt: skip
    assert source.location("train", 4) == f"{tmp_path}/x.tfrecord-1, record 2"


def test_slices_of_splits(builder, tmp_path):
    source = TfdsDataSource("mine/one:1.0.0", splits={"validation": "train[2:]", "train": "train"})
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert [one.example("validation", i)["label"] for i in range(one.num_examples("validation"))] == [2, 3]
    assert source.location("validation", 0) == f"{tmp_path}/x.tfrecord-0, record 3"
    with pytest.raises(UserError, match=r"mine/one:1\.0\.0 has no split 'dev'\. It has train"):
        TfdsDataSource("mine/one:1.0.0", splits=["dev"]).num_examples("dev")


def test_data_sets_that_cannot_be_used(builder):
    with pytest.raises(UserError, match=r"other cannot be opened: Dataset other not found\. .*`tfds build other`"):
        TfdsDataSource("other")
    builder.info.file_format.value = "riegeli"
    with pytest.raises(UserError, match=r"is stored as riegeli, .*--file_format=array_record"):
        TfdsDataSource("mine/one:1.0.0").num_examples("train")
    builder.info.splits = {}
    with pytest.raises(UserError, match=r"has not been prepared in .*`tfds build mine/one"):
        TfdsDataSource("mine/one:1.0.0")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install tensorflow-datasets`, or `pip install -e '\.\[tfds\]'`"):
        TfdsDataSource("glue/mrpc")
