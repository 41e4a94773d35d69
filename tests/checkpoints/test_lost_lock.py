"""A program whose lock or lease was taken by another one writes nothing more and removes nothing."""

import json
import shutil
import time
from collections.abc import Callable

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, ModelDirLock, convert, model_dir_lock, paths
from t5x.checkpoints.best import BEST_FILE, BestRule, Ranking
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.files import lease, locks, remote
from t5x.files.directory import open_directory
from t5x.files.remote import RemotePath
from t5x.files.remote_directory import RemoteDirectory

from .helpers import assert_same, make_tree


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    monkeypatch.setattr(lease, "_TERM", 0.0)  # every check asks the file


@pytest.fixture(params=["object store", "staged"])
def url(request, tmp_path, monkeypatch):
    """A MODEL_DIR in which checkpoints are written to their final place, and one to which they are uploaded."""
    if request.param == "object store":
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        yield f"file://{tmp_path}/bucket/run"
    else:
        yield f"memory://{tmp_path.name}/run"
        memory = fsspec.filesystem("memory")
        memory.rm(f"/{tmp_path.name}", recursive=True)


def take_over(lease_url: str) -> None:
    """Take a lease, as a program on another machine does once it has expired."""
    other = {"pid": 1, "host": "other", "since": "2026-01-01", "machine": "other", "renewed": time.time()}
    RemotePath.parse(lease_url).write_bytes(json.dumps(other).encode())


def contents(url: str) -> dict[str, bytes]:
    directory = RemotePath.parse(url)
    directory.fs.invalidate_cache()
    return {name: (directory / name).read_bytes() for name in directory.descendants()}


def upload(checkpoint, url: str) -> None:
    directory = RemoteDirectory(RemotePath.parse(url))
    directory.clear(paths.CHECKPOINTS)
    directory.upload(checkpoint, paths.CHECKPOINTS)


def write_checkpoint(directory, step: int):
    path = directory / paths.checkpoint_name(step)
    write_own_checkpoint(path, step, arrays(step), sidecars={})
    return path


def arrays(step: int) -> list[tuple[str, np.ndarray]]:
    return [("target/a", np.full(3000, step, np.float32))]


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, make_tree(step), sidecars={})
    store.wait()


def test_save_after_the_lease_was_lost_publishes_nothing_and_keeps_the_checkpoint_of_the_new_holder(url, tmp_path):
    """The new holder writes the same step while the old one is about to publish it."""
    new_checkpoint = write_checkpoint(tmp_path / "new", 2)
    before: dict[str, bytes] = {}
    actions: list[Callable[[], None]] = [lambda: None]

    def lose_lease() -> None:
        take_over(f"{url}/{model_dir_lock.LEASE_FILE}")
        upload(new_checkpoint, f"{url}/{paths.checkpoint_name(2)}")
        before.update(contents(url))

    with ModelDirLock(url):
        store = CheckpointStore(url, keep=1, before_publishing=lambda: actions[0]())
        save(store, 1)
        actions[0] = lose_lease
        store.save(2, make_tree(2), sidecars={})
        with pytest.raises(UserError, match="taken by process 1 on other"):
            store.wait()
        actions[0] = lambda: None
        with pytest.raises(UserError, match="taken by process 1 on other"):
            store.save(3, make_tree(3), sidecars={})
        with pytest.raises(UserError, match="in use by process 1 on other"):
            store.remove_stale_tmp()
        store.keep = 1
        store.retire(2)
    assert contents(url) == before  # the lease included
    assert store.steps() == [1, 2]
    np.testing.assert_array_equal(store.restore(store._readable(2))["target"]["a"], np.full(3000, 2, np.float32))


def test_upload_whose_lease_is_lost_half_way_is_not_completed(tmp_path, monkeypatch):
    """A staged checkpoint is uploaded for minutes; its manifest makes it valid and comes last."""
    url = f"memory://{tmp_path.name}/run"
    original = MemoryFileSystem.put_file

    def put_file(self, local, path, **options):
        take_over(f"{url}/{model_dir_lock.LEASE_FILE}")
        original(self, local, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with ModelDirLock(url):
        store = CheckpointStore(url)
        store.save(1, make_tree(1), sidecars={})
        with pytest.raises(UserError, match="taken by"):
            store.wait()
    assert f"{paths.checkpoint_name(1)}/{paths.MANIFEST}" not in contents(url)
    assert store.steps() == []


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("moment", ["before", "during the upload"])
def test_conversion_that_lost_its_lease_publishes_nothing_and_removes_nothing(tmp_path, monkeypatch, exists, moment):
    url, original = f"memory://{tmp_path.name}/flan", MemoryFileSystem.put_file
    old = {}
    if exists:
        upload(write_checkpoint(tmp_path / "old", 1), url)
        old = {f"flan/{name}": content for name, content in contents(url).items()}

    def lose_lease(*_) -> None:
        take_over(f"{url}/{paths.UNFINISHED}")
        RemotePath.parse(f"{url}.{paths.UNFINISHED}/of_the_new_holder").write_bytes(b"1")
        RemotePath.parse(f"{url}/of_the_new_holder").write_bytes(b"1")

    def put_file(self, local, path, **options):
        lose_lease()
        original(self, local, path, **options)

    with (
        pytest.raises(UserError, match="taken by process 1 on other"),
        convert.uploading(url, overwrite=exists) as path,
    ):
        write_own_checkpoint(path, 2, arrays(2), sidecars={})
        if moment == "before":
            lose_lease()
        else:
            monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    there = contents(f"memory://{tmp_path.name}")
    assert {name: there.get(name) for name in old} == old
    assert there["flan/of_the_new_holder"] == there[f"flan.{paths.UNFINISHED}/of_the_new_holder"] == b"1"
    new = there.keys() - old.keys()
    assert not any(name.endswith(paths.MANIFEST) for name in new)
    assert moment != "before" or not any("state/" in name for name in new)


@pytest.mark.parametrize("moment", ["put_file", "cp_file"])
def test_conversion_that_loses_its_lease_beside_a_complete_copy_reports_the_copy(tmp_path, monkeypatch, moment):
    """When the copy is complete, the old checkpoint stays; once that is being replaced, the copy does."""
    url, original = f"memory://{tmp_path.name}/flan", getattr(MemoryFileSystem, moment)
    upload(write_checkpoint(tmp_path / "old", 1), url)
    old = contents(url)

    def lose_lease(self, source, target, **options):
        original(self, source, target, **options)
        if moment == "cp_file" or target.endswith(paths.MANIFEST):
            take_over(f"{url}/{paths.UNFINISHED}")

    monkeypatch.setattr(MemoryFileSystem, moment, lose_lease)
    with (
        pytest.raises(UserError, match=r"taken by .*is complete at"),
        convert.uploading(url, overwrite=True) as path,
    ):
        write_own_checkpoint(path, 2, arrays(2), sidecars={})
    there = contents(url)
    if moment == "put_file":
        assert {name: content for name, content in there.items() if name != paths.UNFINISHED} == old
    else:
        assert paths.MANIFEST not in there
    assert paths.MANIFEST in contents(f"{url}.{paths.UNFINISHED}")


def test_run_whose_model_dir_was_removed_and_locked_by_another_writes_nothing_there(tmp_path):
    run = tmp_path / "run"
    with ModelDirLock(run), CheckpointStore(run, keep=1) as store:
        save(store, 1)
        shutil.rmtree(run)
        run.mkdir()
        other = locks.acquire(run / model_dir_lock.LOCK_FILE)  # another open file, so another holder
        for step in (1, 2):
            write_checkpoint(run, step)
        (run / "train").mkdir()
        (run / "train/metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
        for _ in range(2):  # the loss is not forgotten once it has been reported
            with pytest.raises(UserError, match="in use"):
                store.save(3, make_tree(3), sidecars={})
        store.best = Ranking(BestRule("train/loss", "min"), run)
        store.retire(2)
        assert {path.name for path in run.iterdir()} == {".lock", "checkpoint_1", "checkpoint_2", "train"}
        locks.release(other)
        save(store, 3)  # it may write again
        assert_same(make_tree(3), store.restore(store.path(3)))
        assert (run / BEST_FILE).exists()
        with pytest.raises(UserError, match="in use"):
            ModelDirLock(run)
    ModelDirLock(run).release()


def test_locked_remote_directory_reports_the_loss_of_its_lease(tmp_path):
    url = f"memory://{tmp_path.name}/job"
    with open_directory(url).locked() as check:
        check()
        take_over(f"{url}/.lock")
        with pytest.raises(UserError, match="taken by process 1 on other"):
            check()
    assert lease.read_holder(f"{url}/.lock")["host"] == "other"
