"""Saves, kills and removals in a directory, in an object store, and in a file system that TensorStore cannot access."""

import os
import threading
from collections.abc import Callable, Sequence

import fsspec
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, manifest, paths
from t5x.checkpoints.formats import open_checkpoint
from t5x.files import remote, remote_directory
from t5x.files.remote import RemotePath
from t5x.files.storage_errors import TransientError

from .helpers import assert_same, make_tree


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.fixture(params=["directory", "object store", "staged"])
def model_dir(request, tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    if request.param == "directory":
        yield str(tmp_path / "run")
    elif request.param == "object store":  # TensorStore's driver of files, and names without a rename
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        yield f"file://{tmp_path}/bucket/run"
    else:
        yield f"memory://{tmp_path.name}/run"
        fsspec.filesystem("memory").store.clear()


@pytest.fixture
def url(model_dir):
    if "://" not in model_dir:
        pytest.skip("a directory renames")
    return model_dir


def save(store: CheckpointStore, *steps: int, **options) -> None:
    for step in steps:
        store.save(step, make_tree(step), sidecars={"model.json": b"{}"}, **options)
    store.wait()


def contents(url: str) -> dict[str, bytes]:
    directory = RemotePath.parse(url)
    directory.fs.invalidate_cache()
    return {name: (directory / name).read_bytes() for name in directory.descendants()}


def run_in_order(call: Callable[..., None], arguments: Sequence[tuple]) -> None:
    for each in arguments:
        call(*each)


def be_killed(*_) -> None:
    raise Killed


def test_a_checkpoint_being_written_is_neither_used_nor_stale(model_dir):
    is_writing, may_finish = threading.Event(), threading.Event()

    def pause() -> None:
        is_writing.set()
        may_finish.wait(60)

    with CheckpointStore(model_dir, before_publishing=pause) as store:
        store.save(1, make_tree(1), sidecars={})
        try:
            assert is_writing.wait(60)
            assert CheckpointStore(model_dir).steps() == store.steps() == []
            with pytest.raises(UserError, match=paths.checkpoint_name(1)):
                open_checkpoint(f"{model_dir}/{paths.checkpoint_name(1)}")
            store.remove_stale_tmp()  # not the save in flight
        finally:
            may_finish.set()
        store.wait()
        assert store.steps() == [1]
        path, restored, damaged = store.restore_latest(CheckpointStore.restore)
    assert (os.fspath(path), damaged) == (f"{model_dir}/{paths.checkpoint_name(1)}", [])
    assert_same(make_tree(1), restored)


def test_checkpoint_of_a_run_that_was_killed_while_writing_is_removed_by_the_next(url, monkeypatch):
    """Killed before the manifest: all else is there."""
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "describe", be_killed)
        patch.setattr(CheckpointStore, "_abandon", lambda *_: None)
        store = CheckpointStore(url)
        store.save(1, make_tree(1), sidecars={})
        with pytest.raises(Killed):
            store.wait()
    new = CheckpointStore(url)
    assert new.steps() == []
    new.remove_stale_tmp()
    assert contents(url) == {}
    save(new, 1)
    assert new.steps() == [1]


def test_removal_that_is_killed_at_any_file_leaves_a_whole_checkpoint_or_an_unfinished_one(url, monkeypatch):
    save(CheckpointStore(url), 1)
    saved, original = contents(url), RemotePath.remove
    monkeypatch.setattr(remote_directory, "run_concurrently", run_in_order)
    for survived in range(len(saved)):
        for name, content in saved.items():
            (RemotePath.parse(url) / name).write_bytes(content)
        remaining = [survived]

        def remove(self, remaining=remaining) -> None:
            if not remaining[0]:
                raise Killed
            remaining[0] -= 1
            original(self)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RemotePath, "remove", remove)
            paths.open_files(url).unpublish(paths.checkpoint_name(1), paths.CHECKPOINTS)
        new = CheckpointStore(url)
        assert new.steps() == ([] if survived else [1])
        new.remove_stale_tmp()
        left = contents(url)
        assert {name: left[name] for name in saved if name in left} == ({} if survived else saved)


def test_directory_of_another_program_is_set_aside(url, caplog):
    other = {"checkpoint_5/checkpoint": b"msgpack", "checkpoint_5/target.w/0": b"0"}
    for name, content in other.items():
        (RemotePath.parse(url) / name).write_bytes(content)
    store = CheckpointStore(url)
    save(store, 5)
    assert store.steps() == [5] and store.newest_step() == 5
    aside = {name.partition("/")[2]: content for name, content in contents(url).items() if ".foreign-" in name}
    assert aside == {name.partition("/")[2]: content for name, content in other.items()}
    assert not any(name.startswith("checkpoint_5/checkpoint") for name in contents(url))


def test_run_ends_at_the_second_save_in_a_row_that_fails_in_the_background(model_dir):
    answers = iter([False, True, False, True, False, False])

    def answer() -> None:
        if not next(answers):
            raise TransientError("it does not answer")

    store = CheckpointStore(model_dir, before_publishing=answer)
    for step in range(1, 7):
        store.save(step, make_tree(step), sidecars={})
    with pytest.raises(TransientError, match="it does not answer"):
        store.save(7, make_tree(7), sidecars={})
    # Unlike buckets, the directory of the object store's test keeps empty directories.
    assert [step for step in store.steps() if manifest.is_of_step(store.path(step), step)] == [2, 4]
