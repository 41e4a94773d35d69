"""Every fault that `t5x doctor` knows, injected, and named with its fix."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from t5x.apps.doctor import checks
from t5x.apps.doctor.checks import holders
from tests.support import commands
from tests.support.paths import REPO


def faults(findings):
    return [finding for finding in findings if finding.status != "ok"]


def only(findings):
    (found,) = faults(findings)
    assert found.fix
    return found


# --- Several processes ------------------------------------------------------------------------------------------------


def test_a_coordinator_that_resolves_to_loopback(monkeypatch):
    monkeypatch.setattr(checks, "resolve", {"node1": ["127.0.1.1"]}.__getitem__)
    found = only(checks.coordinator_findings("node1", is_first=False))
    assert found.status == "error" and "127.0.1.1" in found.message and "/etc/hosts" in found.fix
    for fine in (["10.0.0.4"], ["127.0.1.1", "10.0.0.4"]):
        monkeypatch.setattr(checks, "resolve", {"node1": fine}.__getitem__)
        assert not faults(checks.coordinator_findings("node1", is_first=True))
    monkeypatch.undo()
    assert not faults(checks.coordinator_findings("127.0.0.1", is_first=True))


def test_a_coordinator_without_address():
    found = only(checks.coordinator_findings("no-such-machine.invalid", is_first=False))
    assert found.status == "error" and "does not resolve" in found.message


NAMESPACES = """
set -e
printf '127.0.0.1 localhost\\n127.0.1.1 node1\\n' > hosts
mount --bind hosts /etc/hosts
hostname node1
ip link set lo up

mkdir -p dev
mount -t tmpfs devices dev
mknod dev/accel0 c 1 3
for name in null zero urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount --rbind dev /dev
sleep 600 < /dev/accel0 &
PYTHONPATH={repository} {python} -m t5x doctor network devices --json --coordinator_address node1:4711 \\
  --process_count 2 --process_index 0
"""


def test_a_machine_with_every_fault(tmp_path):
    """In namespaces of its own: the names and the chip's file (a null device) are real."""
    alone = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("ip") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("namespaces need root and iproute2; the checks are tested alone above and below")
    script = NAMESPACES.format(python=sys.executable, repository=REPO)
    removed = ("T5X_CLUSTER", "TPU")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    environment |= {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS": "2"}
    command = [*alone, "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not report["ready"]

    def fault(words):
        (finding,) = [one for one in report["findings"] if one["status"] != "ok" and words in one["message"]]
        return finding

    assert "/etc/hosts" in fault("coordinator's name node1 resolves to 127.0.1.1")["fix"]
    assert "--gpus-per-node" in fault("--gpus-per-task=1")["fix"]
    held = fault("(sleep 600) holds a TPU chip")
    assert held["status"] == "error" and "kill" in held["fix"]
    assert "JAX_PLATFORMS" in fault("1 GPU or TPU device(s), but JAX uses the CPU")["fix"]


# What tasks of SLURM 22.05 find in their environment, by the options of srun, or of sbatch around it.
SLURM_TASKS = {
    "srun --gpus-per-task=1": ("SLURMD_TRES_BIND=gpu:per_task:1 CUDA_VISIBLE_DEVICES=1", True),
    "sbatch --gpus-per-task=1": ("SLURM_GPUS_PER_TASK=1 SLURMD_TRES_BIND=gpu:per_task:1 CUDA_VISIBLE_DEVICES=1", True),
    "srun --gpus-per-task=1 --gpu-bind=none": ("SLURM_GPUS_PER_TASK=1 SLURMD_TRES_BIND=gpu:none", False),
    "srun --gpus-per-node=2": ("CUDA_VISIBLE_DEVICES=0,1", False),
}


@pytest.mark.parametrize("options", SLURM_TASKS)
def test_one_gpu_per_slurm_task(options):
    words, is_fault = SLURM_TASKS[options]
    environment = dict(word.split("=", 1) for word in f"{words} SLURM_NTASKS=4 SLURM_GPUS_ON_NODE=2".split())
    found = faults(checks.gpu_binding_findings(environment))
    assert bool(found) is is_fault
    assert all("--gpus-per-task=1" in one.message and "--gpus-per-node" in one.fix for one in found)


# --- Devices. There are no TPU chips or GPUs here: files stand in for theirs. -----------------------------------------


def test_a_leftover_process_that_holds_a_chip(tmp_path):
    chip = tmp_path / "accel0"
    chip.touch()
    command = [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()", chip]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        held = holders((str(tmp_path / "accel[0-9]*"),))
        process.stdin.close()
    assert list(held) == [process.pid]
    found = only(checks.holder_findings(held, "TPU chip"))
    assert found.status == "error" and str(process.pid) in found.message and f"kill {process.pid}" in found.fix
    assert not holders((str(tmp_path / "accel[0-9]*"),))


def test_devices_that_jax_does_not_use():
    found = only(checks.count_findings(["NVIDIA H200"] * 2, 8, {"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert "2 of 8" in found.message and "CUDA_VISIBLE_DEVICES=0,1" in found.message
    found = faults(checks.count_findings(["cpu"], 8, {"JAX_PLATFORMS": "cpu"}))[0]
    assert found.status == "error" and "JAX_PLATFORMS=cpu" in found.message


# --- Software and storage ---------------------------------------------------------------------------------------------

WORKING = {"jax": "0.11.2", "jaxlib": "0.11.2", "sentencepiece": "0.2.2", "protobuf": "6.33.0"}


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"jax": "0.7.1", "jaxlib": "0.7.1"}, "0.10.2 to 0.12"),
        ({"jax": "0.10.0", "jaxlib": "0.10.0"}, "0.10.2 to 0.12"),
        ({"jaxlib": "0.10.2"}, "same release"),
        ({"jax-cuda12-plugin": "0.10.0"}, "jax-cuda12-plugin"),
        ({"jax-cuda12-plugin": "0.11.2", "jax-cuda13-plugin": "0.11.2"}, "CUDA 12 and 13"),
        ({"sentencepiece": "0.2.3"}, "protobuf 7"),
    ],
)
def test_packages_that_do_not_work_together(changed, word):
    assert not faults(checks.package_findings(WORKING))
    found = only(checks.package_findings(WORKING | changed))
    assert found.status == "error" and word in found.message and found.fix.startswith("pip ")


def test_an_old_python():
    assert only(checks.python_findings((3, 10))).status == "error" and not faults(checks.python_findings((3, 13)))


def test_storage(tmp_path, monkeypatch):
    assert "free" in next(checks.disk_findings(str(tmp_path), size=2**20)).message
    assert only(checks.disk_findings(str(tmp_path / "missing"))).status == "error"
    assert "read and removed" in next(checks.remote_findings("memory://bucket/runs")).message
    assert only(checks.remote_findings("nonsense://bucket")).status == "error"
    monkeypatch.setattr(checks, "_MIN_FREE", float("inf"))
    assert "little space" in only(checks.disk_findings(str(tmp_path), size=2**20)).message


def test_this_machine_is_ready(capsys, tmp_path):
    result = commands.run(capsys, "doctor", "software", "storage", "--path", tmp_path, "--json")
    report = json.loads(result.out)
    assert result.code == 0 and report["ready"], report
    assert {finding["topic"] for finding in report["findings"]} == {"software", "storage"}


def test_a_topic_that_does_not_exist(capsys):
    commands.run(capsys, "doctor", "disk").refused("disk", "storage")


def test_a_check_that_fails_is_a_finding(monkeypatch, capsys):
    def broken(args):
        raise ValueError("boom")
        yield

    monkeypatch.setitem(checks.TOPICS, "software", broken)
    result = commands.run(capsys, "doctor", "software")
    assert result.code == 1 and "ValueError: boom" in result.out and "Traceback" not in result.err
