"""Temporaries: unique, created anew, and nobody else's."""

import os
import signal
import subprocess
import sys

import pytest

from t5x.files import atomic
from t5x.telemetry import jsonl
from tests.support.programs import environment

WRITER = """
import sys, time
from t5x.files import atomic
with atomic.new_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print(file.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """(a process that is writing tmp_path/file, the path of its temporary)."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_a_file_is_replaced_when_the_block_ends_and_only_without_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic.new_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    with atomic.new_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old" and atomic.is_temporary(file.name)
        assert os.path.dirname(file.name) == str(tmp_path)
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_temporaries_are_unique_and_never_an_existing_file_or_link(tmp_path, monkeypatch):
    (tmp_path / "theirs").write_bytes(b"theirs")
    taken = [str(tmp_path / "file.tmp-1"), str(tmp_path / "file.tmp-2")]
    with open(taken[0], "wb") as file:
        file.write(b"theirs")
    os.symlink(tmp_path / "theirs", taken[1])
    names = iter([*taken, str(tmp_path / "file.tmp-3")])
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "unique_name", lambda path: next(names))
        jsonl.replace(tmp_path / "file", [b"ours"])
    assert (tmp_path / "file").read_bytes() == b"ours"
    assert {(tmp_path / name).read_bytes() for name in ("theirs", *taken)} == {b"theirs"}
    assert len({atomic.unique_name(tmp_path / "file") for _ in range(100)}) == 100


def test_files_at_guessable_temporary_names_are_left_alone(tmp_path):
    (tmp_path / "theirs").write_bytes(b"theirs")
    planted = [tmp_path / f"file.tmp{suffix}" for suffix in ("", f"-{os.getpid()}", "-0-00000000-0000000g")]
    for path in planted:
        path.symlink_to(tmp_path / "theirs")
    jsonl.replace(tmp_path / "file", [b"ours"])
    assert all(path.is_symlink() and path.read_bytes() == b"theirs" for path in planted)
    assert (tmp_path / "file").read_bytes() == b"ours" and not (tmp_path / "file").is_symlink()


def test_temporaries_of_killed_but_not_of_live_writers_are_removed(writer, tmp_path):
    process, temporary = writer
    others = [tmp_path / "file.tmp", tmp_path / "file.tmp-12-34", tmp_path / f"{temporary[:-17]}ffffffff-00000000"]
    for path in others:  # the last one is of another host
        path.write_bytes(b"theirs")
    (tmp_path / f"{temporary[:-8]}00000000").symlink_to(others[0])
    left = {*os.listdir(tmp_path)}
    atomic.remove_stale(tmp_path)
    assert {*os.listdir(tmp_path)} == left
    process.send_signal(signal.SIGKILL)
    process.wait()
    atomic.remove_stale(tmp_path)
    assert {*os.listdir(tmp_path)} == left - {os.path.basename(temporary)}


def test_the_first_write_in_a_directory_removes_what_killed_writers_left(writer, tmp_path):
    process, _ = writer
    process.send_signal(signal.SIGKILL)
    process.wait()
    jsonl.replace(tmp_path / "other", [b"ours"])
    assert os.listdir(tmp_path) == ["other"]


def test_a_directory_appears_whole_and_never_replaces_another(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic.new_directory(tmp_path / "made"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with atomic.new_directory(tmp_path / "made") as temporary:
        open(f"{temporary}/file", "wb").close()
        assert not (tmp_path / "made").exists()
    assert os.listdir(tmp_path / "made") == ["file"]
    with pytest.raises(FileExistsError), atomic.new_directory(tmp_path / "made"):
        pass
    assert os.listdir(tmp_path) == ["made"] and os.listdir(tmp_path / "made") == ["file"]
