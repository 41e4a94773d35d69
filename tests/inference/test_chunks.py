"""Chunks on disk, ended at every moment."""

import os
from pathlib import Path

import pytest

from t5x._runtime.errors import UserError
from t5x.inference.output import Chunks

JOB = {"model": "m", "batch_size": 4}


class Ended(BaseException):
    """What `kill -9` is to a program in which nothing may clean up."""


def put(path, text):
    Path(path).write_text(text)


def write_all(directory, output, count=2):
    """What a run does."""
    chunks = Chunks(str(directory), output.name, JOB)
    try:
        chunks.claim(str(output), overwrite=False)
        for i in range(len(chunks.finished), count):
            chunks.write(lambda path, i=i: put(path, f"chunk {i}\n" * 100), {"examples": 100})
        chunks.merge(str(output))
        chunks.remove()
    finally:
        chunks.close()


def finished(directory):
    chunks = Chunks(str(directory), "out", JOB)
    chunks.close()
    return len(chunks.finished)


def test_a_run_that_ends_at_any_system_call_is_gone_on_with(tmp_path, monkeypatch):
    write_all(tmp_path / "tmp", tmp_path / "whole")
    expected = (tmp_path / "whole").read_bytes()
    real = {name: getattr(os, name) for name in ("replace", "fsync", "unlink", "makedirs", "rmdir")}
    calls, last = 0, 0

    def ends(name):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls >= last:
                raise Ended
            return real[name](*args, **kwargs)

        return call

    for name in real:
        monkeypatch.setattr(os, name, ends(name))
    ended = 0
    for moment in range(1, 100):
        directory, output = tmp_path / f"tmp-{moment}", tmp_path / f"out-{moment}"
        calls, last = 0, moment
        try:
            write_all(directory, output)
            break
        except Ended:
            ended += 1
        assert not output.exists() or output.read_bytes() == expected
        calls, last = 0, 10_000
        write_all(directory, output)
        assert output.read_bytes() == expected and not directory.exists()
    assert ended >= 15


def test_chunks_of_another_job_are_refused_or_thrown_away(tmp_path):
    first = Chunks(str(tmp_path / "tmp"), "out", JOB)
    first.write(lambda path: put(path, "x\n"), {"examples": 1})
    with pytest.raises(UserError, match="Another process is writing out"):
        Chunks(str(tmp_path / "tmp"), "out", JOB)
    first.close()
    with pytest.raises(UserError, match="batch_size was 4, is 8"):
        Chunks(str(tmp_path / "tmp"), "out", JOB | {"batch_size": 8})
    assert finished(tmp_path / "tmp") == 1
    anew = Chunks(str(tmp_path / "tmp"), "out", JOB | {"batch_size": 8}, discard_others=True)
    assert anew.finished == [] and not os.path.exists(anew.path(0))


def test_a_chunk_that_was_cut_is_computed_again(tmp_path):
    chunks = Chunks(str(tmp_path / "tmp"), "out", JOB)
    for _ in range(3):
        chunks.write(lambda path: put(path, "whole\n"), {"examples": 1})
    chunks.close()
    os.truncate(chunks.path(1), 3)
    assert finished(tmp_path / "tmp") == 1


def test_an_error_while_writing_leaves_what_was_finished(tmp_path):
    chunks = Chunks(str(tmp_path / "tmp"), "out", JOB)
    chunks.write(lambda path: put(path, "x\n"), {"examples": 1})

    def full(path):
        put(path, "y")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"No space left on device.*start again"):
        chunks.write(full, {"examples": 1})
    chunks.close()
    assert sorted(os.listdir(tmp_path / "tmp")) == ["job.json", "out-chunk00000", "out-chunk00000.COMPLETED"]
    assert finished(tmp_path / "tmp") == 1
