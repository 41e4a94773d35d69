"""Check runs with several processes: the environment that starts them, and the name of process 0."""

import argparse
import os
import socket
from collections.abc import Callable, Iterator, Mapping

from t5x._runtime.errors import UserError
from t5x.apps.doctor import Finding, error, ok, warning

Resolver = Callable[[str], list[str]]


def check(args: argparse.Namespace) -> Iterator[Finding]:
    """Report how several processes would find each other."""
    from t5x.partitioning import cluster

    environment = os.environ
    yield from gpu_binding_findings(environment)
    try:
        process = cluster.find(
            args.coordinator_address, args.process_count, args.process_index, required=False, timeout=10
        )
    except UserError as problem:
        yield error(str(problem), "Pass all three options, or start the processes with srun, mpirun or an indexed Job.")
        return
    if process is None:
        yield ok("one process: no cluster was found and no --coordinator_address was given")
        return
    yield ok(f"process {process.index} of {process.count}, process 0 at {process.coordinator}")
    yield from coordinator_findings(process.host, is_first=process.index == 0)
    if not environment.get(cluster.TOKEN):
        yield warning(
            f"{cluster.TOKEN} is not set: whoever reaches process 0 can join the run, or end it.",
            f"export {cluster.TOKEN}=$(openssl rand -hex 16), the same for all processes",
        )


def resolve(name: str) -> list[str]:
    """Return the IP addresses of a host name."""
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def coordinator_findings(host: str, *, is_first: bool, resolve: Resolver = resolve) -> Iterator[Finding]:
    """Report whether the other machines can reach process 0 by its name."""
    from t5x.partitioning.cluster import is_loopback

    try:
        addresses = resolve(host)
    except OSError as problem:
        yield error(
            f"The coordinator's name {host} does not resolve on this machine ({problem}).",
            "Pass --coordinator_address with the IP address of process 0.",
        )
        return
    if host == "localhost" or host in addresses:
        if is_loopback(addresses[0]):
            yield ok(f"the coordinator is {host}: all processes must run on this machine")
        return
    outside = [address for address in addresses if not is_loopback(address)]
    if outside:
        yield ok(f"the coordinator {host} is {', '.join(outside)}")
        return
    waiting = "the other machines" if is_first else "this process"
    yield error(
        f"The coordinator's name {host} resolves to {addresses[0]}, which means this machine on every machine: "
        f"{waiting} would wait for process 0 in vain.",
        f"Remove {host} from the line of {addresses[0]} in /etc/hosts, or pass --coordinator_address with the IP "
        "address of process 0.",
    )


def gpu_binding_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report SLURM's --gpus-per-task=1, which hides the GPUs of the other tasks on a machine."""
    if environment.get("SLURM_NTASKS", "1") == "1" or environment.get("SLURMD_TRES_BIND") == "gpu:none":
        return
    # sbatch exports the option, srun only its effect.
    asked = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    visible = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if asked or (len(visible) == 1 and environment.get("SLURM_GPUS_ON_NODE", "1") != "1"):
        yield warning(
            "SLURM was started with --gpus-per-task=1: each task sees only its own GPU. NCCL then cannot copy between "
            "the GPUs of a machine directly, and may fail or be slow.",
            "Use --gpus-per-node=N with --ntasks-per-node=1 (one process for all GPUs of a machine), or add "
            "--gpu-bind=none to srun.",
        )
