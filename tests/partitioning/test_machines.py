"""Processes on several machines (network namespaces): lost machines, and the results of one process."""

import signal

import numpy as np
import pytest

from tests.partitioning import machine_check
from tests.partitioning.namespaces import Machines, finish, permitted, running, wait_for
from tests.partitioning.test_distributed import MEMBER
from tests.support.paths import REPO
from tests.support.programs import precompile

pytestmark = pytest.mark.skipif(
    not permitted(), reason="network namespaces need root and iproute2; test_distributed.py does without them"
)
COUNT = 3


def members(machines, root):
    """`member.py` on every machine; each prints `up` and waits."""
    return running(machines, root, [MEMBER, "{index}", COUNT, "machine0:8476", "wait"], COUNT)


def all_up(processes):
    wait_for(lambda: all("up\n" in process.output for process in processes), processes)


@pytest.mark.slow
def test_a_machine_that_loses_its_network_ends_the_run(tmp_path):
    with Machines(COUNT, tmp_path) as machines, members(machines, tmp_path) as processes:
        all_up(processes)
        machines.connect(2, up=False)
        finish(processes, timeout=20)
        machine_check.assert_lost(processes, 2, seconds=4)


@pytest.mark.slow
def test_a_coordinator_that_loses_its_network_ends_the_run(tmp_path):
    with Machines(COUNT, tmp_path) as machines, members(machines, tmp_path) as processes:
        all_up(processes)
        machines.connect(0, up=False)
        assert finish(processes, timeout=20) == [75] * COUNT
        assert all("process 0 (host machine0" in process.error() for process in processes[1:])
        assert all(f"process {n} (host machine{n}" in processes[0].error() for n in (1, 2))
        assert "process 0 has lost its network" in processes[0].error()


@pytest.mark.slow
def test_a_stopped_process_ends_the_run(tmp_path):
    with Machines(COUNT, tmp_path) as machines, members(machines, tmp_path) as processes:
        all_up(processes)
        processes[1].started.send_signal(signal.SIGSTOP)
        others = [processes[0], processes[2]]
        assert finish(others, timeout=20) == [75, 75]
        assert all("process 1 (host machine1" in process.error() for process in others)


@pytest.mark.slow
def test_a_machine_that_never_arrives_is_named(tmp_path):
    with Machines(COUNT, tmp_path) as machines:
        machines.connect(1, up=False)
        with members(machines, tmp_path) as processes:
            assert finish(processes, timeout=120) == [2, 2, 2]
            assert all("1 of 3 processes did not connect: 1." in processes[n].error() for n in (0, 2))
            assert "process 1 did not reach process 0 at machine0:8476" in processes[1].error()


@pytest.mark.slow
def test_machines_with_names_that_mean_themselves_are_refused(tmp_path):
    """As Debian sets them up. Their CPUs would not find each other after everything has been compiled."""
    with Machines(2, tmp_path, own_address="127.0.1.1") as machines:
        words = [MEMBER, "{index}", 2, f"{machines.address(0)}:8476", "wait"]
        with running(machines, tmp_path, words, 2) as processes:
            assert finish(processes, timeout=120) == [2, 2]
            assert any("/etc/hosts" in process.error() for process in processes)


@pytest.mark.slow
def test_two_machines_compile_the_program_of_one_without_the_data(tmp_path):
    program = [REPO / "t5x/main.py", "--run_mode=precompile"]
    place = ["--coordinator_address=machine0:8476", "--process_count=2", "--process_index={index}"]
    with Machines(2, tmp_path) as machines:
        with running(machines, tmp_path, [*program, *precompile(tmp_path / "two"), *place], 2) as processes:
            assert finish(processes, timeout=300) == [0, 0], "\n".join(process.output for process in processes)
        with running(machines, tmp_path, [*program, *precompile(tmp_path / "one")], 1, devices=2) as processes:
            assert finish(processes, timeout=300) == [0], processes[0].output
    one, two = (tmp_path / name / "lowered_hlo_pre_optimization" for name in ("one", "two"))
    assert one.read_text() == two.read_text()
    assert np.load(tmp_path / "two" / "assignment").shape == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["", "s3"])
def test_four_machines_find_what_one_process_finds(tmp_path, store):
    if store:
        pytest.importorskip("moto", reason="the packages of .[stores] are missing")
        pytest.importorskip("s3fs", reason="the packages of .[stores] are missing")
    machine_check.check(tmp_path, store)
