"""Find the processes of a run, from the flags or from the cluster that started it."""

import contextlib
import dataclasses
import glob
import ipaddress
import logging
import os
import socket
from typing import Any

import jax
from jax._src.clusters import ClusterEnv  # also used by jax.distributed.initialize

from t5x.errors import UserError

log = logging.getLogger(__name__)

TOKEN = "T5X_CLUSTER_TOKEN"
_SHORTEST_TOKEN = 16


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in the run.

    Attributes:
      host, port: the address of process 0.
      count: number of processes.
      index: index of this process.
    """

    host: str
    port: int
    count: int
    index: int

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    *,
    required: bool,
    timeout: int,
) -> Place | None:
    """Return the place of this process, or None if it runs alone.

    Args:
      coordinator_address: HOST:PORT of process 0. If this or one of the next two is None, the cluster is queried.
      process_count: number of processes.
      process_index: index of this process.
      required: raise a UserError if no cluster or flag describes the run (`--multiprocess_gpu`).
      timeout: seconds that a cluster may take to report the address of process 0.
    """
    flags = {
        "--coordinator_address": coordinator_address,
        "--process_count": process_count,
        "--process_index": process_index,
    }
    given = [name for name, value in flags.items() if value is not None]
    if process_count is not None and process_count < 1:
        raise UserError(f"--process_count is {process_count}: it must be at least 1.")
    if process_index is not None and process_index < 0:
        raise UserError(f"--process_index is {process_index}: processes are counted from 0.")
    if process_count == 1:
        if process_index:
            raise UserError(f"--process_index is {process_index}, but --process_count is 1: the only process is 0.")
        return None
    if len(given) < len(flags):
        cluster = _cluster(asked=required or bool(given))
        if cluster is None and not given and not required:
            return None
        if cluster is None:
            missing = " and ".join(name for name in flags if name not in given)
            raise UserError(
                f"{missing} {'is' if len(given) == 2 else 'are'} missing"
                + (f" beside {' and '.join(given)}" if given else " for --multiprocess_gpu")
                + ", and no cluster was found that would tell (SLURM, Open MPI, Kubernetes, a TPU pod). Start every "
                "process with --coordinator_address=HOST:PORT of process 0, --process_count=N and its own "
                "--process_index=0 … N-1."
            )
        if process_count is None:
            process_count = cluster.count
            if process_count == 1 and process_index in (None, 0):
                return None
        process_index = cluster.index if process_index is None else process_index
        if coordinator_address is None:
            coordinator_address = os.environ.get("JAX_COORDINATOR_ADDRESS") or cluster.address(timeout)
    if process_index >= process_count:
        raise UserError(
            f"--process_index is {process_index}, but --process_count is {process_count}: it must be 0 to "
            f"{process_count - 1}."
        )
    return Place(*_split(coordinator_address), process_count, process_index)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            f"--coordinator_address is {address!r}: it must be HOST:PORT, the machine of process 0 and a free port "
            "there, such as node001:12345."
        )
    return host.strip("[]"), int(port)


@dataclasses.dataclass(frozen=True)
class _Cluster:
    count: int
    index: int
    environment: type[ClusterEnv]

    def address(self, timeout: int) -> str:
        try:
            return self.environment.get_coordinator_address(
                timeout_secs=timeout, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT")
            )
        except Exception as error:
            raise _unclear(self.environment, error) from error


def _cluster(*, asked: bool) -> _Cluster | None:
    """Return what JAX detects; None outside a cluster, and for a single process unless `asked`."""
    for environment in ClusterEnv._cluster_types:
        if environment.opt_in_only_method or not _worth_asking(environment):
            continue
        try:
            if not environment.is_env_present():
                continue
            # A step with one task runs alone, whatever SLURM_NTASKS of its allocation is.
            steps = os.environ.get("SLURM_STEP_NUM_TASKS") if environment.name == "slurm" else None
            count = int(steps) if steps else environment.get_process_count()
            if count == 1 and not asked:
                return None
            return _Cluster(count, environment.get_process_id(), environment)
        except Exception as error:
            if asked:
                raise _unclear(environment, error) from error
            log.warning("%s; this process goes on alone", _unclear(environment, error))
            return None
    return None


def _worth_asking(environment: type[ClusterEnv]) -> bool:
    """Return False for detection methods that would query the network, or warn, on ordinary machines."""
    name = environment.__name__
    platforms = jax.config.jax_platforms
    if "Tpu" in name and platforms and "tpu" not in platforms:
        return False
    # Only the pods of an indexed job have an index; any other pod runs alone.
    return "K8s" not in name or "JOB_COMPLETION_INDEX" in os.environ


def _unclear(environment: type[ClusterEnv], error: Exception) -> UserError:
    return UserError(
        f"{environment.__name__.removesuffix('Cluster')} seems to have started this process, but does not say where "
        f"the others are ({type(error).__name__}: {error}). Give --coordinator_address, --process_count and "
        "--process_index."
    )


# --- Who may join -----------------------------------------------------------------------------------------------------


def token() -> bytes:
    """Return the secret that the processes of a run share; empty if there is none."""
    value = os.environ.get(TOKEN, "").strip()
    if value and len(value) < _SHORTEST_TOKEN:
        raise UserError(
            f"{TOKEN} has {len(value)} characters: it must have at least {_SHORTEST_TOKEN}, so that nobody guesses it "
            "(`openssl rand -hex 16` makes one)."
        )
    return value.encode()


def local_address(host: str) -> str:
    """Return the local address that `host` resolves to; "" if there is none that other machines can reach.

    A name may resolve to a load balancer, or to this machine's address in another network. On Debian a machine's own
    name resolves to 127.0.1.1, which no other machine can reach.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, _, _, _, (address, *_) in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        if is_loopback(address) and host != "localhost" and host != address:
            continue
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached only from this machine; "" means all addresses."""
    return bool(address) and ipaddress.ip_address(address).is_loopback


# --- This machine -----------------------------------------------------------------------------------------------------


def machine() -> str:
    """Return a name of this machine that is unique in the run."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def visible_gpus() -> str:
    """Return the GPUs that this process may use, according to the environment; empty if there are none."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu", "rocm"}.intersection(platforms.split(",")):
        return ""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return said
    return ",".join(str(n) for n in range(len(glob.glob("/dev/nvidia[0-9]*"))))


def own_gpus(index: int, members: list[dict[str, Any]]) -> list[int] | None:
    """Return the positions of the visible GPUs that this process uses; None for all of them.

    Processes on one machine that see the same GPUs share them out. A process that was given its own GPUs, or is alone
    on its machine, uses all that it sees.
    """
    mine = members[index]
    same = [n for n, m in enumerate(members) if (m["machine"], m["gpus"]) == (mine["machine"], mine["gpus"])]
    count = len([gpu for gpu in mine["gpus"].split(",") if gpu])
    if len(same) == 1 or not count or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if count % len(same):
        raise UserError(
            f"{len(same)} processes on {mine['host']} see the same {count} GPUs and cannot divide them evenly. Start "
            "as many as divide them, or give each its own with CUDA_VISIBLE_DEVICES."
        )
    share = count // len(same)
    first = same.index(index) * share
    return list(range(first, first + share))
