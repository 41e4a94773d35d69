"""Find the processes of a run, from the flags or from the cluster that started it."""

import contextlib
import dataclasses
import ipaddress
import logging
import os
import socket
from typing import Any

import jax

from t5x._runtime.errors import UserError, check_at_least

log = logging.getLogger(__name__)

TOKEN = "T5X_CLUSTER_TOKEN"
_MIN_TOKEN_LENGTH = 16


@dataclasses.dataclass(frozen=True)
class ProcessAddress:
    """Where process 0 of a run listens, and which of its processes this one is.

    Attributes:
      host, port: of process 0.
      count: number of processes.
      index: index of this process.
    """

    host: str
    port: int
    count: int
    index: int

    @property
    def coordinator(self) -> str:
        return join_address(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around the host if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    *,
    required: bool,
    timeout: int,
) -> ProcessAddress | None:
    """Return the address and index of this process, or None if it runs alone.

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
    passed = [name for name, value in flags.items() if value is not None]
    check_at_least(1, "--", process_count=process_count)
    _check_index(process_index, process_count)
    if process_count == 1:
        return None
    if coordinator_address is None or process_count is None or process_index is None:
        cluster = _detect(required=required or bool(passed))
        if cluster is None and not passed and not required:
            return None
        if cluster is None:
            missing = ", ".join(name for name in flags if name not in passed)
            raise UserError(
                f"Missing: {missing} (passed: {', '.join(passed) or '--multiprocess_gpu'}), and no cluster was found "
                "(SLURM, Open MPI, Kubernetes, a TPU pod). Start every process with --coordinator_address=HOST:PORT of "
                "process 0, --process_count=N and its own --process_index=0 … N-1."
            )
        if process_count is None:
            process_count = cluster.count
            if process_count == 1 and process_index in (None, 0):
                return None
        process_index = cluster.index if process_index is None else process_index
        if coordinator_address is None:
            coordinator_address = os.environ.get("JAX_COORDINATOR_ADDRESS") or cluster.find_address(timeout)
    _check_index(process_index, process_count)
    return ProcessAddress(*_split(coordinator_address), process_count, process_index)


def _check_index(index: int | None, count: int | None) -> None:
    if index is not None and (index < 0 or (count is not None and index >= count)):
        most = "--process_count - 1" if count is None else count - 1
        raise UserError(f"--process_index is {index}: it must be 0 to {most}.")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator_address is {address!r}: it must be HOST:PORT of process 0 (node1:12345).")
    return host.strip("[]"), int(port)


@dataclasses.dataclass(frozen=True)
class _Cluster:
    count: int
    index: int
    environment: Any  # a class of JAX

    def find_address(self, timeout: int) -> str:
        try:
            return self.environment.get_coordinator_address(
                timeout_secs=timeout, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT")
            )
        except Exception as error:
            raise _unclear(self.environment, error) from error


def _detect(*, required: bool) -> _Cluster | None:
    """Return the cluster that JAX detects; None outside a cluster, and for a single process unless `required`.

    `jax.distributed.initialize` uses the same classes, but reports nothing before it has connected. We need the address
    and the number of processes before, to authenticate the processes and to name those that are missing.
    """
    from jax._src.clusters import ClusterEnv

    for environment in ClusterEnv._cluster_types:
        if environment.opt_in_only_method or not _is_plausible(environment.__name__):
            continue
        try:
            if not environment.is_env_present():
                continue
            # A step with one task runs alone, whatever SLURM_NTASKS of its allocation is.
            tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if environment.name == "slurm" else None
            count = int(tasks) if tasks else environment.get_process_count()
            return None if count == 1 and not required else _Cluster(count, environment.get_process_id(), environment)
        except Exception as error:
            if required:
                raise _unclear(environment, error) from error
            log.warning("%s This process continues alone.", _unclear(environment, error))
            return None
    return None


def _is_plausible(name: str) -> bool:
    """Return False for detection methods that would query the network, or warn, on ordinary machines."""
    platforms = jax.config.values["jax_platforms"]
    if "Tpu" in name and platforms and "tpu" not in platforms:
        return False
    # Only the pods of an indexed job have an index; any other pod runs alone.
    return "K8s" not in name or "JOB_COMPLETION_INDEX" in os.environ


def _unclear(environment: Any, error: Exception) -> UserError:
    return UserError(
        f"{environment.__name__.removesuffix('Cluster')} seems to have started this process, but the address of the "
        f"other processes is unknown ({type(error).__name__}: {error}). Pass --coordinator_address, --process_count "
        "and --process_index."
    )


# --- Who may join -----------------------------------------------------------------------------------------------------


def read_token() -> bytes:
    """Return the secret that the processes of a run share; empty if there is none."""
    value = os.environ.get(TOKEN, "").strip()
    if value and len(value) < _MIN_TOKEN_LENGTH:
        raise UserError(
            f"{TOKEN} has {len(value)} characters: it must have at least {_MIN_TOKEN_LENGTH}, so that nobody can "
            "guess it (`openssl rand -hex 16` makes one)."
        )
    return value.encode()


def local_address(host: str) -> str:
    """Return the local address that `host` resolves to; "" if there is none that other machines can reach.

    A name may resolve to a load balancer, or to this machine's address in another network. On Debian a machine's own
    name resolves to 127.0.1.1, which no other machine can reach.
    """
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, _, _, _, endpoint in sorted(resolved, key=lambda entry: entry[0] != socket.AF_INET):
        address = str(endpoint[0])
        if is_loopback(address) and host != "localhost" and host != address:
            continue
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached only from this machine; "" means all addresses."""
    return bool(address) and ipaddress.ip_address(address).is_loopback
