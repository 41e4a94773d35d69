"""A SLURM cluster on this machine: a controller and nodes, each a network namespace; the nodes have their own names."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.partitioning.namespaces import HUB, Machines, permitted
from tests.support.paths import REPO
from tests.support.programs import environment
from tests.support.xla_flags import QUICK_COMPILATION

INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2"

# A requeued job starts again after cred_expire seconds, at the controller's next round.
_CONFIGURATION = """\
ClusterName=t5x
SlurmctldHost={controller}({hub})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
ReturnToService=2
KillWait=20
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def missing() -> str | None:
    """Return why there can be no cluster here, or None."""
    programs = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)]
    if programs:
        return f"{', '.join(programs)} not installed: {INSTALL}"
    return None if permitted() else "network namespaces need root, CAP_NET_ADMIN and iproute2"


class Cluster(contextlib.AbstractContextManager):
    """A running cluster.

    Attributes:
      root: the directory with its configuration and logs.
      environment: of the programs that submit jobs.
    """

    def __init__(self, root: Path, nodes: int = 2):
        self.root = root
        self.environment = environment(
            SLURM_CONF=str(root / "slurm.conf"), JAX_PLATFORMS="cpu", XLA_FLAGS=QUICK_COMPILATION
        )
        self._nodes, self._machines = nodes, Machines(nodes, root)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        nodes = [f"NodeName=machine{n} NodeAddr={self._machines.address(n)} CPUs=16" for n in range(self._nodes)]
        settings = {"controller": socket.gethostname(), "hub": HUB, "root": self.root, "nodes": "\n".join(nodes)}
        (self.root / "slurm.conf").write_text(_CONFIGURATION.format(**settings))
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is mounted in the namespaces
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}-file={self.root}/munged.{name}" for name in ("log", "pid", "seed")]
        munge += ["--foreground", "--force", f"--socket={self.root}/munge.socket", f"--key-file={key}"]
        with contextlib.ExitStack() as until_open:
            until_open.enter_context(self._machines)
            until_open.enter_context(self._daemon("hub", ["munged", *munge]))
            until_open.enter_context(self._daemon("hub", ["slurmctld", "-D"]))
            for n in range(self._nodes):
                until_open.enter_context(self._daemon(n, ["slurmd", "-D", "-N", f"machine{n}"]))
            self._wait_until_idle()
            self._open = until_open.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.call("scancel", "--user", "root")
        self._open.close()

    @contextlib.contextmanager
    def _daemon(self, machine: int | str, words: list[str]) -> Iterator[None]:
        with open(self.root / f"{words[0]}-{machine}.out", "w") as output:
            options = {"env": self.environment, "stdout": output, "stderr": output}
            if machine == "hub":
                process = self._machines.start_at_hub(words, **options)
            else:
                process = self._machines.start(machine, words, **options)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.call("sinfo", "--noheader", "--format=%T").split() != ["idle"]:
            logs = [path.read_text()[-2000:] for path in self.root.glob("*.out")]
            assert time.monotonic() < deadline, "\n\n".join(logs)
            time.sleep(0.2)

    def start(self, *words: Any, **options: Any) -> subprocess.Popen:
        """Start a program where jobs are submitted."""
        return self._machines.start_at_hub(words, env=self.environment, cwd=REPO, text=True, **options)

    def call(self, *words: Any) -> str:
        """Run a program where jobs are submitted, and return its output."""
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return process.communicate(timeout=120)[0]

    def tasks(self, node: int) -> list[int]:
        """Return the processes of t5x that srun has started on a node."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if self._is_task(pid, f"SLURMD_NODENAME=machine{node}")]

    def _is_task(self, pid: int, node: str) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except (OSError, UnicodeDecodeError):  # it has ended, or is not ours
            return False
        ours = {node, f"SLURM_CONF={self.root / 'slurm.conf'}"} <= set(variables)
        return ours and words[1:3] == ["-m", "t5x"] and any(name.startswith("SLURM_PROCID=") for name in variables)
