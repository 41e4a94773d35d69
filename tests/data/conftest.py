"""What the tests of t5x.data share: real data where it is, small files, and clean registries."""

import gzip
import json

import hypothesis
import pytest

from t5x import data
from t5x.data import cache_reader
from tests.support.paths import SHARED

hypothesis.settings.register_profile("t5x", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("t5x")


@pytest.fixture
def shared_data():
    if not SHARED.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    return SHARED


@pytest.fixture
def t5_model_file(shared_data):
    return str(shared_data / "t5_vocab/spiece.model")


@pytest.fixture
def write(tmp_path):
    """write(name, text or bytes or list of JSON-able lines) -> path; a .gz name is compressed."""

    def write_file(name, content):
        if isinstance(content, list):
            content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in content)
        if isinstance(content, str):
            content = content.encode()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write_file


def byte_features():
    vocabulary = data.ByteVocabulary()
    return {"inputs": data.Feature(vocabulary), "targets": data.Feature(vocabulary)}


def make_task(examples, preprocessors=(data.preprocessors.tokenize, data.preprocessors.append_eos), name="task"):
    """A task over a list of {"inputs": text, "targets": text}, not registered."""
    source = data.FunctionDataSource(lambda split: examples, splits=("train",))
    return data.Task(name, source, byte_features(), list(preprocessors))


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """The directory of the caches of tasks."""
    monkeypatch.setenv("T5X_TASK_CACHES", str(tmp_path / "caches"))
    cache_reader._warn_once.cache_clear()
    return tmp_path / "caches"


@pytest.fixture
def lines(write):
    return write("train.jsonl", [{"inputs": f"question {i}" * (1 + i % 3), "targets": str(i)} for i in range(50)])
