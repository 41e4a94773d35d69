"""Launch jobs on a real SLURM, disturb them, and check that they end as if nothing had happened.

    python -m tests.apps.launching.slurm_harness

`t5x launch slurm` trains a tiny model on 2 nodes x 2 processes. The processes of one node are killed (`kill -9`): the
job must be requeued, resume, and end with parameters that are bitwise identical to those of an undisturbed job. Small
programs in the place of t5x show the rest: a job that reaches its time limit is requeued, a job with an error or one
that is cancelled is not, and the number of restarts is bounded.
"""

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.apps.launching.slurm_cluster import Cluster, missing
from tests.chaos.harness import Result
from tests.support.paths import REPO
from tests.support.programs import train

STEPS = 60
# Stops after a signal, as a training run does; a second start succeeds.
WAITS = """
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
trap 'exit 75' TERM
for ((i = 0; i < 3000; i++)); do sleep 0.1; done
"""


class Job:
    """A job on 2 nodes x 2 processes that `t5x launch slurm` has submitted and follows."""

    def __init__(self, cluster: Cluster, name: str, options: Sequence[object], command: Sequence[str]):
        self._cluster = cluster
        self._printed = cluster.root / f"{name}.out"
        words = [
            sys.executable, "-m", "t5x", "launch", "slurm", "--nodes", 2, "--tasks_per_node", 2, "--follow",
            "--save_to", cluster.root / f"launch-{name}", *options, "--", *command,
        ]  # fmt: skip
        with self._printed.open("w") as file:
            self._launcher = cluster.start(*words, stdout=file, stderr=file)

    @classmethod
    def of_program(cls, cluster: Cluster, name: str, program: str, *options: object) -> "Job":
        """Submit a job whose processes run a shell program in the place of Python."""
        python = cluster.root / f"{name}.sh"
        python.write_text(f"#!/bin/bash\n{program}\n")
        python.chmod(0o755)
        return cls(cluster, name, ["--nocheck", "--python", python, *options], ["train", "--gin_file=a.gin"])

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @property
    def id(self) -> str:
        self.wait_for(lambda: "submitted job" in self.printed)
        return re.search(r"submitted job (\d+)", self.printed)[1]

    def field(self, name: str) -> str:
        """Return what SLURM reports about the job."""
        return re.search(rf"{name}=(\S+)", self._cluster.call("scontrol", "-o", "show", "job", self.id))[1]

    def wait_for(self, condition: Callable[[], Any], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._launcher.poll() is None and time.monotonic() < deadline, self.printed[-5000:]
            time.sleep(0.05)

    def end(self) -> tuple[int, str, int]:
        """Return the exit status of the launcher, the last state of the job, and how often it was restarted."""
        status = self._launcher.wait(600)
        return status, self.field("JobState"), int(self.field("Restarts"))


def train_undisturbed(cluster: Cluster) -> Result:
    model_dir = cluster.root / "undisturbed"
    job = Job(cluster, "undisturbed", [], train(model_dir, STEPS))
    assert job.end() == (0, "COMPLETED", 0), job.printed[-5000:]
    return Result.of(model_dir, STEPS)


def train_with_dead_node(cluster: Cluster) -> Result:
    """Kill the processes of the second node after a checkpoint; return the result of the requeued job."""
    model_dir = cluster.root / "dead_node"
    job = Job(cluster, "dead_node", [], train(model_dir, STEPS))
    job.wait_for(lambda: (model_dir / "checkpoint_10").exists())
    killed = cluster.tasks(1)
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert job.end() == (0, "COMPLETED", 1), job.printed[-5000:]
    assert "(host machine1, pid" in job.printed, "no process named the one that died"
    assert "resuming from" in job.printed
    return Result.of(model_dir, STEPS)


def run_final_ends(cluster: Cluster) -> None:
    """An error and a cancelled job are final; restarts are bounded."""
    error = Job.of_program(cluster, "error", "exit 2")
    dies = Job.of_program(cluster, "dies", "exit 75", "--max_restarts", 1)
    cancelled = Job.of_program(cluster, "cancelled", WAITS)
    cancelled.wait_for(lambda: cancelled.field("JobState") == "RUNNING" and "starts on machine" in cancelled.printed)
    cluster.call("scancel", cancelled.id)
    assert error.end() == (2, "FAILED", 0), error.printed
    assert cancelled.end()[1:] == ("CANCELLED", 0), cancelled.printed
    assert dies.end() == (75, "FAILED", 1), dies.printed


def run_into_time_limit(cluster: Cluster) -> None:
    """The processes get SIGTERM before the limit; the job is requeued."""
    job = Job.of_program(cluster, "time_limit", WAITS, "--time", 1, "--save_seconds", 50)
    assert job.end() == (0, "COMPLETED", 1), job.printed


def run_through_failed_node(cluster: Cluster) -> None:
    """SLURM takes a node down: it requeues the job itself."""
    job = Job.of_program(cluster, "failed_node", WAITS)
    job.wait_for(lambda: "starts on machine" in job.printed)
    cluster.call("scontrol", "update", "NodeName=machine1", "State=DOWN", "Reason=test")
    job.wait_for(lambda: job.field("Restarts") == "1", 60)
    cluster.call("scontrol", "update", "NodeName=machine1", "State=RESUME")
    assert job.end() == (0, "COMPLETED", 1), job.printed


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster in a directory of `runs`, which is not in /tmp, as `t5x launch slurm` requires."""
    (REPO / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir=REPO / "runs", ignore_cleanup_errors=True) as root,
        Cluster(Path(root)) as cluster,
    ):
        yield cluster


def main() -> None:
    if reason := missing():
        sys.exit(f"error: there can be no SLURM cluster here: {reason}")
    with running_cluster() as cluster:
        print(cluster.call("sinfo"), flush=True)
        begun = time.monotonic()
        report = lambda what: print(f"{time.monotonic() - begun:5.0f} s  {what}", flush=True)
        run_final_ends(cluster)
        report("an error and scancel end a job for good; --max_restarts bounds restarts")
        run_into_time_limit(cluster)
        report("before the time limit: SIGTERM, then requeued")
        run_through_failed_node(cluster)
        report("a failed node: requeued by SLURM")
        expected = train_undisturbed(cluster)
        report("trained on 2 nodes x 2 processes")
        train_with_dead_node(cluster).assert_same(expected)
        report("processes of a node killed: requeued, resumed, bitwise identical parameters and metrics")


if __name__ == "__main__":
    main()
