import os
import signal
import socket

import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, ModelDirLock, model_dir_lock
from t5x.checkpoints.model_dir_lock import LOCK_FILE
from t5x.files import atomic

from .helpers import start_program


@pytest.fixture
def program():
    """Starts programs and makes sure that none outlives the test."""
    started = []

    def start(*arguments):
        started.append(start_program(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_second_holder_gets_the_name_of_the_first_and_a_killed_holder_leaves_nothing(tmp_path, program):
    holder = program("hold_lock.py", tmp_path)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on {socket.gethostname()} since 20"):
        ModelDirLock(tmp_path)

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with ModelDirLock(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).exists()


def test_a_forked_worker_does_not_keep_the_lock_of_its_dead_parent(tmp_path, program):
    holder = program("hold_lock.py", tmp_path, "fork")
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError, match="in use"):
            ModelDirLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(worker, 0)
        ModelDirLock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_release_lets_the_next_one_in_and_may_be_repeated(tmp_path):
    first = ModelDirLock(tmp_path / "run")
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        ModelDirLock(tmp_path / "run")
    first.release()
    second = ModelDirLock(tmp_path / "run")
    first.release()
    with pytest.raises(UserError):
        ModelDirLock(tmp_path / "run")
    second.release()


def test_process_that_does_not_see_the_lock_of_process_0_is_refused(tmp_path, monkeypatch):
    """Its MODEL_DIR has the same name on another disk."""
    monkeypatch.setattr(model_dir_lock, "_SHARED_PATIENCE", 1)
    with ModelDirLock(tmp_path) as lock, pytest.raises(UserError, match=r"not the same directory .* on node0"):
        lock._check_shared({"pid": 1, "host": "node0", "since": "2026-01-01"})


def test_unfinished_checkpoints_of_a_live_run_are_not_removed(tmp_path, program):
    unfinished = tmp_path / atomic.unique_name("checkpoint_3")
    unfinished.mkdir()
    holder = program("hold_lock.py", tmp_path)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid}"):
        CheckpointStore(tmp_path).remove_stale_tmp()
    assert unfinished.exists()

    holder.kill()
    holder.wait()
    with ModelDirLock(tmp_path):
        CheckpointStore(tmp_path).remove_stale_tmp()
    assert not unfinished.exists()
