"""Several processes that save and restore together, as real processes with two virtual devices each."""

import dataclasses
import os
import random
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, ModelDirLock, paths, transfer
from t5x.checkpoints.formats.own_checkpoint import read_own_checkpoint
from t5x.checkpoints.model_description import sidecars
from t5x.files import atomic
from t5x.partitioning import PjitPartitioner
from t5x.trainer.restore import RunState
from t5x.trainer.state_layout import StateLayout
from tests.support import tiny
from tests.support.programs import free_port

from .helpers import SIDECARS, abstract, assert_same, make_tree, names, start_program


@pytest.fixture
def start():
    """Starts processes that run together; none outlives the test."""
    started = []

    def start(directory, *what, count=2):
        port = free_port()
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // count}"
        started.extend(
            start_program("together.py", directory, port, index, count, *what, env={"XLA_FLAGS": flags})
            for index in range(count)
        )
        return started[-count:]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outputs(processes) -> list[str]:
    """What each has printed, once all have ended well."""
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(e for _, e in said)
    return [output for output, _ in said]


@pytest.mark.slow
def test_any_number_of_processes_restores_a_save_of_another_number(tmp_path, start):
    first, second = outputs(start(tmp_path, "save", 4))
    assert first == second == "at step 0, 0 damaged\n" + "".join(f"at step {step}\n" for step in (1, 2, 3, 4))
    assert names(tmp_path) == {".lock", "checkpoint_1", "checkpoint_3", "checkpoint_4"}, "keep=2, the first is pinned"
    store = CheckpointStore(tmp_path)
    assert store.latest_whole() == (store.path(4), [])
    assert_same(make_tree(4), store.restore(store.path(4)))
    assert_same(
        make_tree(4), store.restore(store.path(4), abstract(make_tree(4), SingleDeviceSharding(jax.devices()[0])))
    )
    assert store.read_sidecar(store.path(4), "process") == b"0"
    for process in (0, 1):
        written = store.path(4) / "state" / f"ocdbt.process_{process}" / "d"
        assert paths.tree_size(written) > 500, "each is to have written a part"

    for step in (5, 6):
        store.save(step, make_tree(step), sidecars=SIDECARS)
    store.close()
    (store.path(6) / "model.json").write_bytes(b"")
    (tmp_path / atomic.unique_name("checkpoint_9")).mkdir()
    four = outputs(start(tmp_path, "save", 1, count=4))
    assert four == ["at step 5, 1 damaged\nat step 6\n"] * 4
    assert names(tmp_path) > {".lock", "checkpoint_1", "checkpoint_5", "checkpoint_6"}
    assert len([name for name in names(tmp_path) if name.startswith("checkpoint_6.damaged-")]) == 1
    assert not any(".tmp-" in name for name in names(tmp_path))
    assert_same(make_tree(6), store.restore(store.path(6)))


@pytest.fixture
def disk(tmp_path):
    """(a directory, whether it is on a disk of 4 MB)."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield directory, mounted
    if mounted:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_failure_in_one_process_fails_in_all_and_the_next_save_is_complete(disk, start):
    directory, small = disk
    said = outputs(start(directory, "fail", *["fill"] * small))
    for lines in (output.splitlines() for output in said):
        assert lines[1] == "1: "
        assert lines[2].startswith(f"2: checkpoint_2 could not be saved in {directory}: the disk is full.")
        assert "the newest is checkpoint_1" in lines[2]
        assert lines[3] == "3: "
        if small:
            assert lines[4].startswith(f"4: checkpoint_4 could not be saved in {directory}: the disk is full.")
            assert lines[5] == "5: "
    last = 5 if small else 3
    assert names(directory) == {".lock", "checkpoint_1", "checkpoint_3"} | ({"checkpoint_5"} if small else set())
    store = CheckpointStore(directory)
    assert_same(make_tree(last), store.restore(store.path(last)))


def test_a_process_killed_at_any_moment_ends_all_and_leaves_whole_checkpoints_only(tmp_path, start):
    rng = random.Random(1)
    store = CheckpointStore(tmp_path)
    reached = 0
    for victim in (1, 0):
        processes = start(tmp_path, "for-ever")
        assert processes[0].stdout.readline() == f"at step {reached}, 0 damaged\n", processes[0].communicate()[1]
        for _ in range(3):
            processes[0].stdout.readline()
        with pytest.raises(UserError, match=f"in use by process {processes[0].pid}"):
            ModelDirLock(tmp_path)
        time.sleep(rng.uniform(0, 0.1))
        processes[victim].send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate(timeout=60)
        assert processes[1 - victim].returncode not in (0, None)

        assert store.latest_whole()[1] == []
        reached = store.steps()[-1]
        for step in store.steps():
            assert_same(make_tree(step), store.restore(store.path(step)))
    with ModelDirLock(tmp_path), CheckpointStore(tmp_path, keep=2) as store:
        store.remove_stale_tmp()
        store.save(reached + 1, make_tree(reached + 1), sidecars=SIDECARS)
    assert names(tmp_path) == {".lock", "checkpoint_1", f"checkpoint_{reached}", f"checkpoint_{reached + 1}"}


@pytest.mark.slow
def test_run_resumes_on_several_processes_with_stacked_or_unrolled_layers(tmp_path, start):
    model = tiny.model(dataclasses.replace(tiny.WIDE, scan_layers=True))
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))
    run, rng = RunState(0, {"batches": 7, "lanes": []}), np.random.default_rng(0)
    with CheckpointStore(tmp_path) as store:
        state = jax.tree.map(lambda x: rng.normal(0, 99, x.shape).astype(x.dtype), layout.abstract)
        store.save(0, state.replace_step(np.int32(0)).state_dict(), sidecars=sidecars(model, None) | run.sidecars())
    assert outputs(start(tmp_path, "resume")) == ["7 [[0, 2, 0], [2, 2, 1]]\n"] * 2
    before, after = (transfer.canonical_arrays(read_own_checkpoint(store.path(step))) for step in (0, 1))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name].read(), after[name].read(), err_msg=name)


ROWS = {
    "each has its own": [[[0, 2, 5], [2, 2, 6]], [[4, 4, 6]]],
    "two have the same": [[[0, 4, 5]], [[0, 4, 5]], [[4, 4, 6]], [[4, 4, 6]]],
    "some are shared": [[[0, 2, 5], [2, 2, 6]], [[2, 6, 6]]],
}


@pytest.mark.parametrize("case", ROWS)
def test_the_position_of_all_rows_is_that_of_every_process_once(monkeypatch, case):
    from t5x.data.lanes import states_of_rows
    from t5x.partitioning import distributed
    from t5x.trainer.restore import position_of_all

    states = [{"seed": 1, "batches": 3, "lanes": lanes} for lanes in ROWS[case]]
    monkeypatch.setattr(distributed, "exchange", lambda name, mine: states)
    merged = position_of_all(states[0])
    assert merged["batches"] == 3
    everyone = [run for lanes in ROWS[case] for run in lanes]
    assert states_of_rows(range(8), merged["lanes"]) == states_of_rows(range(8), everyone)
    assert sum(count for _, count, *_ in merged["lanes"]) == 8
