"""The batch script of `t5x launch slurm`: its directives, and what it does for each exit status of the processes."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support import commands

TRAIN = ("--", "train", "--gin_file=a b.gin", "--gin.MODEL_DIR=/shared/runs/Mine")


def write(capsys, directory: Path, *options: object, command=TRAIN) -> Path:
    words = ("slurm", "--dry_run", "--nocheck", "--save_to", directory, *options, *command)
    result = commands.run(capsys, "launch", *words)
    assert result.code == 0, result.err
    return directory / "job.sh"


def directives(script: Path) -> dict[str, str]:
    """Return the options as sbatch reads them: up to the first line that is a command."""
    found = {}
    for line in script.read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            (option,) = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            name, _, value = option.removeprefix("--").partition("=")
            found[name] = value
    return found


def test_directives(capsys, tmp_path):
    options = "--nodes 2 --tasks_per_node 4 --gpus_per_node a100:4 --cpus_per_task 8 --time 1-00:00:00 --partition gpu"
    more = ("--account", "lab", "--sbatch", "qos=high", "--sbatch=--comment=two words #1", "--save_seconds", 300)
    script = write(capsys, tmp_path / "a dir", *options.split(), *more)
    assert directives(script) == {
        "job-name": "mine", "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "a100:4", "cpus-per-task": "8",
        "time": "1-00:00:00", "partition": "gpu", "account": "lab", "chdir": os.getcwd(), "signal": "TERM@300",
        "output": str(tmp_path / "a dir" / "slurm-%j.log"), "open-mode": "append", "requeue": "", "qos": "high",
        "comment": "two words #1",
    }  # fmt: skip
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def play(capsys, tmp_path, monkeypatch):
    """Run a script with programs of these names that record how they are called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    called = tmp_path / "called"

    def program(name: str, body: str) -> None:
        record = f'printf "%s\\n" "{name} $*" >> {shlex.quote(str(called))}'
        (programs / name).write_text(f"#!/bin/bash\n{record}\n{body}\n")
        (programs / name).chmod(0o755)

    def play(status: int, *options: object, state: str = "RUNNING", restarts: int = 0):
        variables = f'echo "$SETTING" >> {shlex.quote(str(called))}; [ ${{#T5X_CLUSTER_TOKEN}} -ge 16 ] || exit 99'
        program("srun", f"{variables}; exit {status}")
        program("squeue", f"echo {state}")
        program("scontrol", "")
        script = write(capsys, tmp_path / "saved", *options)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        called.unlink(missing_ok=True)
        done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60)
        return done, called.read_text() if called.exists() else ""

    return play


@pytest.mark.parametrize(
    ("status", "requeued"),
    [(0, False), (1, False), (2, False), (130, False), (75, True), (137, True), (139, True), (143, True)],
)
def test_only_what_may_go_well_next_time_is_requeued(status, requeued, play):
    done, called = play(status)
    assert done.returncode == status
    assert ("scontrol requeue 7" in called) == requeued


def test_restarts_are_bounded_and_a_cancelled_job_stays_so(play):
    assert "requeue" in play(75, "--max_restarts", 3, restarts=2)[1]
    done, called = play(75, "--max_restarts", 3, restarts=3)
    assert "requeue" not in called and "sbatch" in done.stdout and done.returncode == 75
    assert "requeue" not in play(75, state="CANCELLED")[1]


def test_the_command_reaches_srun_word_by_word(play):
    _, called = play(0, "--env", "SETTING=it's $HOME", "--cpus_per_task", 8)
    assert "it's $HOME" in called and "--cpus-per-task=8" in called and "-m t5x train --gin_file=a b.gin" in called


def test_a_failed_setup_starts_nothing(play):
    done, called = play(0, "--setup", "true", "--setup", "module load nothing")
    assert done.returncode == 2 and "module load nothing" in done.stderr and not called


def test_no_sbatch_and_one_that_refuses(capsys, tmp_path, monkeypatch):
    words = ("slurm", "--nocheck", "--save_to", tmp_path / "saved", *TRAIN)
    monkeypatch.setenv("PATH", str(tmp_path))
    commands.run(capsys, "launch", *words).refused("sbatch", "login node")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: invalid partition specified: gpu' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    commands.run(capsys, "launch", *words).refused("sbatch", "invalid partition specified: gpu")


@pytest.mark.parametrize(
    ("options", "model_dir", "words"),
    [
        ((), "/tmp/run", ("/tmp/run", "share")),
        (("--nodes", 0), "/shared/run", ("--nodes",)),
        (("--sbatch", "a\nrm -rf ~"), "/shared/run", ("one line",)),
    ],
    ids=["not shared", "no nodes", "a second line"],
)
def test_wrong_options(options, model_dir, words, capsys, tmp_path):
    command = ("--", "train", "--gin_file=a.gin", f"--gin.MODEL_DIR={model_dir}")
    result = commands.run(capsys, "launch", "slurm", "--nocheck", "--save_to", tmp_path / "saved", *options, *command)
    result.refused(*words)
    assert not (tmp_path / "saved").exists()
