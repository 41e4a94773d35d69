"""Several processes on this machine: what they tell each other, what each holds, and how they end together."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from t5x._runtime.errors import UserError
from t5x.partitioning import cluster, distributed, multiprocess, rendezvous
from tests.support.programs import environment, free_port, start_python

MEMBER = Path(__file__).with_name("member.py")


def begin(
    job: str, count: int, devices: int = 1, port: int | None = None, only: Iterable[int] | None = None, **more: str
) -> list[subprocess.Popen]:
    """Starts the processes of a run, or only some of them."""
    port = port or free_port()
    proxy = "http://127.0.0.1:9"  # as in many clusters; nothing answers there
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    env = environment(http_proxy=proxy, https_proxy=proxy, XLA_FLAGS=flags, PYTHONFAULTHANDLER="1", **more)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    arguments = [[str(n), str(count), f"127.0.0.1:{port}", job] for n in (range(count) if only is None else only)]
    return [start_python(MEMBER, *words, env=env, **pipes) for words in arguments]


def finish(processes: list[subprocess.Popen]) -> list[subprocess.CompletedProcess]:
    done = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGABRT)
        told = "\n\n".join(process.communicate(timeout=20)[1][-6000:] for process in processes[len(done) :])
        pytest.fail(f"Process {len(done)} does not end. Where it and those after it are:\n{told}")
    finally:
        for process in processes:
            process.kill()
    return done


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    """It ended with one message of ours, without a traceback or a dump of JAX."""
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr and "stack trace" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


# A process that is alone, as a command starts it; its library writes past Python.
ALONE = """
import os
from t5x.cli import options
from t5x.cli.parser import VerbParser
parser = VerbParser('test')
options.add_processes(parser)
with options.processes(parser.parse_args([])):
    os.write(1, b"NCCL INFO\\n")
    print("data")
    if os.environ["PYTHONUNBUFFERED"]:
        os._exit(0)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_prints_of_libraries_are_not_among_the_data(unbuffered):
    env = environment(PYTHONUNBUFFERED=unbuffered)
    done = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "data\n"), done.stderr
    assert "NCCL INFO" in done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def work(cache):
    done = finish(begin("work", 2, devices=4, JAX_COMPILATION_CACHE_DIR=str(cache)))
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    return [json.loads(process.stdout) for process in done]  # and nothing else: gloo writes to standard output


@pytest.mark.slow
def test_programs_between_cpus_are_not_kept(work, cache):
    """XLA reads them back without the order of their collectives, and gloo mixes these up: a second start failed."""
    assert work and not list(cache.iterdir())


def test_processes_tell_each_other(work):
    for process in work:
        told = process["told"]
        assert told["rounds"] == [[f"0 {n}", f"1 {n}"] for n in range(3)]
        assert told["shared"] == [0, 1, 2]
        assert told["notes"] == [None, ["last"]]
        assert told["keys"] == [2, 0], "keys of earlier rounds were left"


@pytest.mark.parametrize(
    ("name", "mesh", "rows"),
    [
        ("data", {"data": 8, "model": 1}, [(0, 16, 32), (16, 32, 32)]),
        ("model inside", {"data": 2, "model": 4}, [(0, 4, 8), (4, 8, 8)]),
        ("model across", {"data": 1, "model": 8}, [(0, 4, 4), (0, 4, 4)]),
        ("tp", {"data": 1, "model": 8}, [(0, 4, 4), (0, 4, 4)]),
        ("hybrid", {"replica": 2, "data": 2, "model": 2}, [(0, 8, 16), (8, 16, 16)]),
    ],
)
def test_each_process_reads_the_rows_of_its_devices(work, name, mesh, rows):
    for index, (process, expected) in enumerate(zip(work, rows, strict=True)):
        found = process["meshes"][name]
        assert found["reads them first"] == (index == 0 or mesh["model"] < 8)
        assert found["mesh"] == mesh
        assert tuple(found["rows"]) == expected
        assert tuple(found["chunk"]) == expected[:2]
        assert found["right"], "a row came to the wrong device"
        assert found["processes of a model"] == (2 if mesh["model"] == 8 else 1)


def test_the_end_waits_for_what_the_devices_still_compute():
    """Without it the processes hung: a sum that begins when the run has ended does not find the other processes."""
    for process in finish(begin("leave", 2, devices=2)):
        assert process.returncode == 0, process.stderr
        assert [float(line) for line in process.stdout.split()] == pytest.approx([2, 2 * 0.739085])  # cos x = x


def test_a_model_straddles_processes_and_one_is_killed():
    *others, victim = begin("die", 3, devices=2)
    done = finish([*others, victim])
    found = [json.loads(process.stdout) for process in done]
    assert [each["rows"] for each in found] == [[0, 4, 8], [0, 8, 8], [4, 8, 8]]
    assert all(each["right"] for each in found)
    for process in done[:2]:
        assert process.returncode == 75, process.stderr
        assert_one_line(process, f"process 2 (host {socket.gethostname()}, pid {victim.pid}) died", "last checkpoint")


def test_a_killed_coordinator_ends_the_others():
    leader, *others = begin("die_first", 3)
    for process in finish([leader, *others])[1:]:
        assert process.returncode == 75, process.stderr
        assert_one_line(process, f"process 0 (host {socket.gethostname()}, pid {leader.pid}) died", "last checkpoint")


@pytest.mark.parametrize(("job", "victim"), [("hang", 1), pytest.param("hang_first", 0, marks=pytest.mark.slow)])
def test_a_stopped_process_ends_the_others(job, victim):
    processes = begin(job, 2)
    (done,) = finish([processes[1 - victim]])
    os.kill(processes[victim].pid, signal.SIGCONT)
    (woken,) = finish([processes[victim]])
    assert done.returncode == woken.returncode == 75
    assert_one_line(done, f"received nothing for 4 s from process {victim} (host ")
    assert_one_line(woken, f"process {1 - victim} (host ", "died")


def test_a_users_error_ends_all():
    leader, victim = finish(begin("refuse", 2))
    assert (leader.returncode, victim.returncode) == (2, 2)
    assert_one_line(victim, "error: the file is missing. Give it.")
    assert_one_line(leader, "process 1 (host ", "the file is missing. Give it.")


def test_an_error_of_all_is_each_ones_own():
    for process in finish(begin("refuse_all", 2)):
        assert process.returncode == 2
        assert process.stderr.count("error: all say this.") == 1, process.stderr
        assert_one_line(process)


@pytest.mark.slow
def test_a_finished_process_waits_for_the_others():
    for process in finish(begin("last", 2)):
        assert (process.returncode, process.stdout) == (75, "finished\n"), process.stderr
        assert "error" not in process.stderr


# --- Flags and clusters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"multiprocess_gpu": True}, "--multiprocess_gpu"),
        ({"coordinator_address": "here:1"}, "Missing: --process_count, --process_index"),
        ({"process_count": 2, "process_index": 0}, "Missing: --coordinator_address"),
        ({"process_count": 2, "process_index": 2, "coordinator_address": "here:1"}, "0 to 1"),
        ({"process_count": 2, "process_index": 0, "coordinator_address": "here"}, "HOST:PORT"),
        ({"process_count": 1, "process_index": 1}, "--process_index is 1"),
        ({"process_count": 0}, "--process_count is 0"),
        ({"initialization_timeout": 0}, "--initialization_timeout is 0"),
    ],
)
def test_wrong_flags_are_errors(flags, words):
    with pytest.raises(UserError, match=words):
        multiprocess.start(**flags)


def test_an_unreachable_coordinator_is_one_error():
    address = f"127.0.0.1:{free_port()}"
    flags = {"coordinator_address": address, "process_count": 2, "initialization_timeout": 1}
    with pytest.raises(UserError, match=f"process 1 did not reach process 0 at {address} within 1 s"):
        multiprocess.start(process_index=1, **flags)
    with pytest.raises(UserError, match=r"1 of 2 processes .*: 1[.]"):
        multiprocess.start(process_index=0, **flags)


def test_nobody_takes_the_port_of_jax_before_jax_does():
    bind = lambda address: rendezvous.bind(address, 0, socket.SO_REUSEPORT)
    with bind("") as everywhere, bind("127.0.0.1") as here:
        for held, host, family in (
            (everywhere, "127.0.0.1", socket.AF_INET),
            (everywhere, "::", socket.AF_INET6),
            (here, "127.0.0.1", socket.AF_INET),
            (here, "", socket.AF_INET),
        ):
            port = held.getsockname()[1]
            if family == socket.AF_INET or socket.has_dualstack_ipv6():
                with pytest.raises(OSError, match="in use"):
                    socket.create_server((host, port), family=family)


def test_alone_nothing_is_started():
    multiprocess.start()
    multiprocess.start(process_count=1, process_index=0)
    multiprocess.stop()
    assert distributed.is_leader()
    assert distributed.exchange("name", "mine") == ["mine"]
    assert distributed.broadcast("name", 1) == 1
    distributed.barrier("name")
    assert distributed.poll("note") is None
    distributed.put("note", 1)
    assert distributed.poll("note") == 1


def slurm(monkeypatch, tasks: int, **more: str) -> None:
    variables = {"JOB_ID": "7", "STEP_NODELIST": "gpu[003-005]", "NTASKS": str(tasks), "PROCID": "1", "LOCALID": "1"}
    for name, value in {**variables, **more}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_slurm_is_found(monkeypatch):
    find = lambda *flags: cluster.find(*(flags or (None, None, None)), required=False, timeout=1)
    slurm(monkeypatch, 4)
    assert find() == cluster.ProcessAddress("gpu003", 61447, 4, 1)  # JAX's own choice of a port: 61440 + job
    assert find("other:99", None, None) == cluster.ProcessAddress("other", 99, 4, 1)
    assert find("other:99", 8, 5) == cluster.ProcessAddress("other", 99, 8, 5)
    with pytest.raises(UserError, match="--process_index is 5: it must be 0 to 3"):
        find(None, None, 5)
    slurm(monkeypatch, 4, STEP_NUM_TASKS="1")
    assert find() is None
    slurm(monkeypatch, 1, STEP_NUM_TASKS="1", PROCID="0")
    assert find() is None


def test_a_single_pod_makes_no_requests(monkeypatch, recwarn):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert cluster.find(None, None, None, required=False, timeout=1) is None
    assert not recwarn.list


def test_processes_of_a_machine_divide_its_gpus():
    seen = ["a 0,1,2,3", "a 0,1,2,3", "b 0", "b 1", "c 0,1"]
    member = lambda n, machine, gpus: rendezvous.Member(n, 5, machine, 1, machine, gpus)
    members = [member(n, *one.split()) for n, one in enumerate(seen)]
    assert [rendezvous.own_gpus(me, members) for me in members] == [[0, 1], [2, 3], None, None, None]
    three = [member(n, "a", "0,1,2,3") for n in range(3)]
    with pytest.raises(UserError, match=r"3 processes on a .* 4 GPUs.*CUDA_VISIBLE_DEVICES"):
        rendezvous.own_gpus(three[0], three)


def test_processes_with_scattered_indices_divide_the_gpus_of_their_machine():
    """As when a scheduler deals processes out to machines in turns."""
    seen = ["a 0,1,2,3", "b 0,1", "a 0,1,2,3", "c 0,1,2,3", "b 0,1", "c 0,1,2,3", "d 0"]
    members = [rendezvous.Member(n, 7, one[0], 1, *one.split()) for n, one in enumerate(seen)]
    assert [rendezvous.own_gpus(me, members) for me in members] == [[0, 1], [0], [2, 3], [0, 1], [1], [2, 3], None]


def test_devices_that_the_user_chose_for_jax_are_not_divided_again(monkeypatch):
    members = [rendezvous.Member(n, 2, "a", 1, "a", "0,1,2,3") for n in range(2)]
    assert rendezvous.own_gpus(members[1], members) == [2, 3]
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3")
    assert rendezvous.own_gpus(members[1], members) is None


def test_jax_gets_the_share_of_gpus_of_each_process():
    """Processes 0 and 2 see the same GPUs; process 1 has its own."""
    port, processes = free_port(), []
    for index, gpus in enumerate(["0,1,2,3", "7", "0,1,2,3"]):
        processes += begin("gpus", 3, port=port, only=[index], CUDA_VISIBLE_DEVICES=gpus, MEMBER_PLATFORMS="")
    done = finish(processes)
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert [json.loads(one.stdout) for one in done] == ["0,1", "all", "2,3"]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([("0", "2"), ("0", "3")], [None, None]),  # --gpus-per-task=1: each has one, and calls it 0
        ([("0,1", "2,3"), ("0,1", "2,3")], [[0], [1]]),  # --gpus-per-node=2
        ([("0", "2,3"), ("1", "2,3")], [None, None]),  # the same, and a script that chose one for each
    ],
)
def test_tasks_of_slurm_in_cgroups_have_their_own_gpus(monkeypatch, tasks, expected):
    monkeypatch.setattr(rendezvous.jax, "config", type("config", (), {"values": {"jax_platforms": "cuda"}}))
    members = []
    for index, (visible, physical) in enumerate(tasks):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setenv("SLURM_STEP_GPUS", physical)
        members.append(rendezvous.Member.here(cluster.ProcessAddress("node", 1, 2, index)))
    assert [rendezvous.own_gpus(member, members) for member in members] == expected
