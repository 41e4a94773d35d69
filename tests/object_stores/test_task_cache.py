"""Caches of tasks on real S3 and GCS servers: batches are those of the source, and a killed writer continues."""

import json

import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data import cache_reader, cache_writer, preprocessors
from t5x.files.directory import open_directory
from tests.data.conftest import byte_features
from tests.object_stores import proxy, servers

pytestmark = pytest.mark.nightly


@pytest.fixture
def task(tmp_path, monkeypatch):
    lines = [json.dumps({"inputs": f"question {i}", "targets": str(i)}) for i in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("T5X_TASK_CACHES", "")
    source = data.JsonLinesDataSource({"train": str(tmp_path / "train.jsonl")})
    return data.Task("cached", source, byte_features(), [preprocessors.tokenize, preprocessors.append_eos])


def batches(task):
    cfg = data.DatasetConfig(task, {"inputs": 32, "targets": 8}, "train", 4, shuffle=True, seed=3, num_workers=0)
    with data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter(pack=False)) as loader:
        return [{name: array.tolist() for name, array in next(loader).items()} for _ in range(12)]


def test_a_cache_is_written_by_a_writer_that_fails_and_continues(task, store, tmp_path, monkeypatch):
    store.proxy.rate, store.proxy.faults = 0.05, tuple(set(proxy.FAULTS) - {"delay"})
    home = f"{store.url}/caches"
    files, expected = open_directory(f"{home}/cached/train"), batches(task)
    write_shard = cache_writer.write_shard

    def kill(work, number, report):
        if number == 3:
            raise KeyboardInterrupt
        return write_shard(work, number, report)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache_writer, "write_shard", kill)
        cache_writer.write(task, "train", directory=home, num_workers=0, examples_per_shard=10)
    assert len(files.names()) == 7 and not files.exists("COMPLETED")
    monkeypatch.setenv("T5X_TASK_CACHES", f"{tmp_path / 'none'}:{home}")
    assert cache_reader.find(task, "train") is None
    written = cache_writer.write(task, "train", num_workers=0, directory=home)
    assert (written.written, written.shards) == (2, 5)
    local = cache_writer.write(task, "train", num_workers=0, directory=str(tmp_path / "here"), examples_per_shard=10)
    for name in map(cache_reader.shard_name, range(5)):
        assert files.read_bytes(name) == open_directory(local.path).read_bytes(name)
    assert cache_reader.find(task, "train").num_examples == 50
    assert batches(task) == expected


def test_unwritable_cache_directory_is_named(task, store):
    missing = store.url.replace(servers.BUCKET, "no-such-bucket")
    with pytest.raises(UserError, match="no-such-bucket"):
        cache_writer.write(task, "train", directory=missing, num_workers=0)
