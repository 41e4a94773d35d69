"""The local directory of a remote one's files."""

import os
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5x._runtime.errors import UserError
from t5x.files import atomic, mirror
from t5x.files import remote as remote_files
from t5x.files.mirror import local_files
from t5x.files.remote import RemotePath


@pytest.fixture
def remote(tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    path = RemotePath.parse(f"memory://mirror-{tmp_path.name}/run")
    yield path
    path.fs.rm(path.path, recursive=True)


def contents(remote: RemotePath) -> dict[str, bytes]:
    return {name: (remote / name).read_bytes() for name in remote.descendants()}


def write(directory: str, name: str, content: str) -> None:
    os.makedirs(os.path.dirname(path := os.path.join(directory, name)), exist_ok=True)
    with open(path, "w") as file:
        file.write(content)


def is_unread(name: str) -> bool:
    return name.startswith(("checkpoint_", "events."))


def test_changes_are_uploaded_and_found_by_the_next_start(remote):
    (remote / "checkpoint_1/state").write_bytes(b"large")
    with local_files(remote.url, writes=True, unread=is_unread) as (directory, upload):
        write(directory, "train/metrics.jsonl", "1\n")
        write(directory, "train/events.1", "a")
        write(directory, "old.txt", "x")
        upload()
        assert contents(remote)["train/metrics.jsonl"] == b"1\n"
        write(directory, "train/metrics.jsonl", "1\n2\n")
        os.unlink(os.path.join(directory, "old.txt"))
    expected = {"checkpoint_1/state": b"large", "train/metrics.jsonl": b"1\n2\n", "train/events.1": b"a"}
    assert contents(remote) == expected
    with local_files(remote.url, writes=True, unread=is_unread) as (directory, upload):
        assert [(os.path.relpath(at, directory), names) for at, _, names in os.walk(directory) if names] == [
            ("train", ["metrics.jsonl"])
        ]
    assert contents(remote) == expected


def test_changes_are_uploaded_from_time_to_time(remote, monkeypatch):
    monkeypatch.setattr(mirror, "_PERIOD", 0.05)
    with local_files(remote.url, writes=True, unread=is_unread) as (directory, _upload):
        write(directory, "a", "1")
        for _ in range(200):
            if contents(remote) == {"a": b"1"}:
                break
            time.sleep(0.05)
        assert contents(remote) == {"a": b"1"}


def test_a_run_that_lost_its_right_uploads_nothing(remote):
    def check() -> None:
        raise UserError("taken by another")

    (remote / "a").write_bytes(b"theirs")
    with (
        pytest.raises(UserError, match="taken by another"),
        local_files(remote.url, writes=True, unread=is_unread, check=check) as (directory, _upload),
    ):
        write(directory, "a", "mine")
    assert contents(remote) == {"a": b"theirs"}


def test_other_processes_write_nothing(remote):
    (remote / "a").write_bytes(b"1")
    with local_files(remote.url, writes=False, unread=is_unread) as (directory, upload):
        write(directory, "a", "2")
        upload()
    assert contents(remote) == {"a": b"1"}


def test_files_of_a_run_that_fails_are_uploaded(remote):
    with (
        pytest.raises(ZeroDivisionError),
        local_files(remote.url, writes=True, unread=is_unread) as (directory, _upload),
    ):
        write(directory, "train/metrics.jsonl", "1\n")
        raise ZeroDivisionError
    assert contents(remote) == {"train/metrics.jsonl": b"1\n"}


def test_unfinished_files_are_not_uploaded(remote):
    with local_files(remote.url, writes=True, unread=is_unread) as (directory, upload):
        with atomic.new_file(os.path.join(directory, "a")) as file:
            file.write(b"half")
            file.flush()
            upload()
            assert contents(remote) == {}
        upload()
        assert contents(remote) == {"a": b"half"}


def test_large_files_are_uploaded_only_on_request(remote, monkeypatch):
    monkeypatch.setattr(mirror, "_PERIOD", 0.02)
    monkeypatch.setattr(mirror, "_LARGE_BYTES", 100)
    with local_files(remote.url, writes=True, unread=is_unread) as (directory, upload):
        write(directory, "large", "x" * 101)
        for content in ("1", "22"):  # the second upload begins when the first has ended
            write(directory, "small", content)
            for _ in range(500):
                if contents(remote).get("small") == content.encode():
                    break
                time.sleep(0.02)
            assert contents(remote)["small"] == content.encode()
        assert "large" not in contents(remote)
        upload()
        assert contents(remote)["large"] == b"x" * 101


def test_file_whose_upload_failed_is_uploaded_the_next_time(remote, monkeypatch):
    monkeypatch.setattr(remote_files, "_RETRY_DELAYS", ())

    def pipe_file(self, path, value, **options):
        raise PermissionError("not you")

    with local_files(remote.url, writes=True, unread=is_unread) as (directory, upload):
        write(directory, "a", "1")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
            with pytest.raises(UserError, match="not you"):
                upload()
        upload()
        assert contents(remote) == {"a": b"1"}


def test_names_that_lead_out_of_the_directory_are_not_downloaded(remote, tmp_path):
    (remote / "a").write_bytes(b"1")
    evil = f"{remote.path}/b/../../../../../evil"
    remote.fs.store[evil] = remote.fs.store[f"{remote.path}/a"]
    try:
        with local_files(remote.url, writes=True, unread=is_unread) as (directory, _upload):
            assert os.listdir(directory) == ["a"]
            assert not list(tmp_path.rglob("evil"))
    finally:
        del remote.fs.store[evil]
