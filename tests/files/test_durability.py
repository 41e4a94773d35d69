"""What was said to be written is there after a power cut; what replaces something does so at once or not at all.

Each test fails if any flush is taken out of the code that it runs: see `disk.py` for the disk.
"""

import gzip
import json
import os
from pathlib import Path

import fsspec
import pytest

from t5x import data
from t5x.checkpoints import CheckpointStore, ModelDirLock, array_writer, remote_reading
from t5x.checkpoints.convert import convert
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.store import _Save
from t5x.data import cache_reader, cache_writer, preprocessors
from t5x.files import atomic, local_copies
from t5x.inference.output import Chunks, FileOutput
from t5x.telemetry import MetricWriter, copy_progress, jsonl
from tests.checkpoints.formats import huggingface_models as models
from tests.checkpoints.helpers import SIDECARS, assert_same, make_tree
from tests.data.conftest import byte_features
from tests.files.disk import Disk, contents, write


@pytest.fixture
def disk(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", monkeypatch)
    yield disk
    disk.close()


# --- The functions that all writers use -------------------------------------------------------------------------------


def test_a_new_file_is_on_the_disk_and_replaces_another_at_once(disk, tmp_path):
    path = disk.root / "below" / "file"
    atomic.make_directories(path.parent)
    for content in (b"old", b"new"):
        with atomic.new_file(path) as file:
            file.write(content)
        assert contents(disk.cut(tmp_path / f"after-{content}")) == {"below/file": content}
    assert [image["below/file"] for image in disk.hasty] == [b"old", b"new"]


def test_a_new_directory_is_on_the_disk_and_appears_whole(disk, tmp_path):
    with atomic.new_directory(disk.root / "some" / "directory") as temporary:
        os.makedirs(f"{temporary}/below")
        for name in ("a", "below/b"):
            with open(f"{temporary}/{name}", "wb") as file:
                file.write(name.encode())
    whole = {"some/directory/a": b"a", "some/directory/below/b": b"below/b"}
    assert disk.hasty == [whole] and contents(disk.cut(tmp_path / "after")) == whole


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_whole_after_a_power_cut(disk, tmp_path):
    run = disk.root / "runs" / "one"
    with ModelDirLock(run), CheckpointStore(run) as store:
        for step in (1, 2):
            store.save(step, make_tree(step), sidecars=SIDECARS, pinned=step == 1)
            store.wait()
            after = CheckpointStore(disk.cut(tmp_path / f"after-{step}") / "runs" / "one")
            assert after.latest_whole() == (after.path(step), [])
            assert_same(make_tree(step), after.restore(after.path(step)))
        assert (after.path(1) / "PINNED").exists()
        assert json.loads((after.directory / ".lock").read_text())["pid"] == os.getpid()
    for number, image in enumerate(disk.hasty):
        early = CheckpointStore(write(image, tmp_path / f"hasty-{number}") / "runs" / "one")
        for step in early.steps():
            early.verify(early.path(step))


def test_each_process_flushes_its_own_part_of_a_checkpoint(disk, tmp_path):
    """The first one flushes the rest, and cannot do it for other hosts."""
    temporary = disk.root / "checkpoint_1.tmp"
    (temporary / "state").mkdir(parents=True)
    atomic.sync(disk.root)
    atomic.sync(temporary)
    store = CheckpointStore(disk.root)
    save = _Save(1, store.directory / temporary.name, array_writer.HostArrays(make_tree(1)), {}, False, 0)
    assert store._write_arrays(save, save.arrays)
    atomic.sync(temporary / "state")
    assert contents(disk.cut(tmp_path / "after")) == contents(disk.root) != {}


@pytest.mark.parametrize("to", ["t5x", "native", "hf"])
def test_a_converted_checkpoint_is_whole_after_a_power_cut(to, disk, tmp_path):
    source = models.write_directory(tmp_path / "source", models.tiny_tensors(), models.tiny_config())
    for options in ({}, {"overwrite": True}):
        convert(str(source), str(disk.root / "new" / "model"), to=to, **options)
        after = disk.cut(tmp_path / f"after-{len(options)}") / "new" / "model"
        assert contents(after) == contents(disk.root / "new" / "model")
    arrays = open_checkpoint(after).arrays
    for name, array in open_checkpoint(source).arrays.items():
        assert arrays[name].read().tobytes() == array.read().tobytes()


def test_a_copy_of_a_remote_checkpoint_is_whole_after_a_power_cut(disk, tmp_path, monkeypatch):
    source = models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config())
    memory = fsspec.filesystem("memory")
    try:
        for name, content in contents(source).items():
            memory.pipe(f"/bucket/hf/{name}", content)
        monkeypatch.setenv("T5X_CACHE_DIR", str(disk.root / "cache"))
        copy = remote_reading.stage("memory://bucket/hf")
        after = disk.cut(tmp_path / "after") / os.path.relpath(copy, disk.root)
        assert contents(after) == contents(source)
        # A killed copy is resumed: files of the right size are not fetched again.
        for image in disk.hasty:
            copied = [name for name in image if ".part/hf/" in name and not atomic.is_temporary(name)]
            assert all(image[name] == contents(source)[name.split("/hf/")[1]] for name in copied)
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


# --- Metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_on_the_disk_after_a_flush(disk, tmp_path):
    directory = disk.root / "run" / "train"
    with MetricWriter(directory, collection="train") as writer:
        for step in (1, 2):
            writer.write_scalars(step, {"loss": step})
            writer.flush()
            assert contents(disk.cut(tmp_path / f"after-{step}")) == contents(disk.root)
    with MetricWriter(directory, collection="train", purge_step=1):
        after = disk.cut(tmp_path / "purged") / "run" / "train"
        assert [record for record, _ in jsonl.read(after / "metrics.jsonl")] == [{"step": 1, "loss": 1}]
    assert [image["run/train/metrics.jsonl"].count(b"\n") for image in disk.hasty] == [1]


# --- Inference --------------------------------------------------------------------------------------------------------


def lines(number):
    return [b"%d %d\n" % (number, i) for i in range(100 + number)]


def test_results_are_on_the_disk_chunk_by_chunk_and_whole(disk, tmp_path):
    path, job = disk.root / "out.jsonl", {"model": "m"}
    with FileOutput(str(path), overwrite=False) as output:
        assert output.begin(job) == []
        for number in range(3):
            output.write(lines(number), {"number": number})
            directory = disk.cut(tmp_path / f"after-{number}") / "tmp-out.jsonl"
            after = Chunks(str(directory), "out.jsonl", job)
            after.close()
            assert [record["number"] for record in after.finished] == [*range(number + 1)]
        output.finish()
    whole = b"".join(line for number in range(3) for line in lines(number))
    assert (disk.cut(tmp_path / "after") / "out.jsonl").read_bytes() == whole == path.read_bytes()
    for number, image in enumerate(disk.hasty):
        assert image.get("out.jsonl", whole) == whole
        early = Chunks(str(write(image, tmp_path / f"hasty-{number}") / "tmp-out.jsonl"), "out.jsonl", job)
        early.close()
        completed = [name for name in image if name.endswith(".COMPLETED")]
        assert len(early.finished) == len(completed), "a chunk was declared finished before it was on the disk"


# --- Copies and caches of data ----------------------------------------------------------------------------------------


def test_a_staged_copy_is_whole_after_a_power_cut(disk, tmp_path, monkeypatch):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"line\n" * 1000))
    monkeypatch.setenv("T5X_CACHE_DIR", str(disk.root / "cache"))
    (copy,) = local_copies.stage([str(tmp_path / "x.txt.gz")], copy_progress)
    monkeypatch.setenv("T5X_CACHE_DIR", str(disk.cut(tmp_path / "after") / "cache"))
    monkeypatch.setattr(local_copies._CopiedFile, "make", lambda *_: pytest.fail("it was there before the power cut"))
    (again,) = local_copies.stage([str(tmp_path / "x.txt.gz")], copy_progress)
    assert Path(again.path).read_bytes() == Path(copy.path).read_bytes() == b"line\n" * 1000


def test_a_cache_of_a_task_is_whole_after_a_power_cut(disk, tmp_path):
    lines = [json.dumps({"inputs": f"question {i}", "targets": str(i)}) for i in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    source = data.JsonLinesDataSource({"train": str(tmp_path / "train.jsonl")})
    task = data.Task("task", source, byte_features(), [preprocessors.tokenize])
    options = {"num_workers": 0, "examples_per_shard": 20}
    assert cache_writer.write(task, "train", directory=str(disk.root / "caches"), **options).written == 3
    after = disk.cut(tmp_path / "after") / "caches"
    assert (after / "task" / "train" / cache_reader.COMPLETED).exists()
    assert cache_writer.write(task, "train", directory=str(after), **options).written == 0
