"""Checks of runs with several processes: the environment that starts them, names, interfaces, TPU slices."""

import argparse
import contextlib
import fcntl
import os
import re
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from t5x.doctor.device_files import TPU_FILES, device_files
from t5x.doctor.findings import Finding, error, ok, warning
from t5x.errors import UserError

_SIOCGIFADDR = 0x8915
Resolver = Callable[[str], list[str]]


def check(args: argparse.Namespace) -> Iterator[Finding]:
    """Report how several processes would find each other."""
    from t5x.partitioning import cluster

    environment = os.environ
    yield from gpu_binding_findings(environment)
    yield from slice_findings(accelerator_type(environment), args.process_count)
    try:
        found = cluster.find(
            args.coordinator_address, args.process_count, args.process_index, required=False, timeout=10
        )
    except UserError as problem:
        yield error(str(problem), "Pass all three options, or start the processes with srun, mpirun or an indexed Job.")
        return
    if found is None:
        yield ok("one process: no cluster was found and no --coordinator_address was given")
        return
    yield ok(f"process {found.index} of {found.count}, process 0 at {found.coordinator}")
    yield from coordinator_findings(found.host, is_first=found.index == 0)
    yield from own_name_findings(socket.gethostname())
    yield from interface_findings(interfaces(), environment)
    if not environment.get(cluster.TOKEN):
        yield warning(
            f"{cluster.TOKEN} is not set: whoever reaches process 0 can join the run, or end it.",
            f"export {cluster.TOKEN}=$(openssl rand -hex 16), the same for all processes",
        )


def resolve(name: str) -> list[str]:
    """Return the addresses of a name."""
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
    own = ", ".join(f"{address} ({name})" for name, address in interfaces().items())
    what = "the other machines" if is_first else "this process"
    yield error(
        f"The coordinator's name {host} resolves to {addresses[0]}, which means this machine on every machine: {what} "
        "would wait for process 0 in vain.",
        f"Remove {host} from the line of {addresses[0]} in /etc/hosts, or pass --coordinator_address with the IP "
        "address of process 0" + (f"; addresses of this machine: {own}." if own else "."),
    )  # fmt: skip


def own_name_findings(name: str) -> Iterator[Finding]:
    """Report a machine that others cannot reach by its own name, which gloo announces to them."""
    from t5x.partitioning.cluster import local_address

    if not local_address(name):
        yield warning(
            f"This machine's name {name} does not resolve to an address that other machines can reach: a run on the "
            "CPUs of several machines fails (GPUs and TPUs do not use the name).",
            f"Write its IP address next to {name} in /etc/hosts, in place of 127.0.1.1.",
        )


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up, except loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def interface_findings(found: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report several interfaces, of which processes may pick ones that do not reach each other."""
    listed = ", ".join(f"{name} {address}" for name, address in found.items())
    if len(found) < 2:
        yield ok(f"network interface: {listed}") if found else warning(
            "There is no network interface with an IPv4 address besides loopback.",
            "Several processes work on this machine only, with --coordinator_address 127.0.0.1:PORT.",
        )
        return
    if chosen := environment.get("NCCL_SOCKET_IFNAME"):
        yield ok(f"network interfaces: {listed}; NCCL_SOCKET_IFNAME is {chosen}")
        return
    physical = next((name for name in found if re.match(r"(e|ib|bond)", name)), next(iter(found)))
    yield warning(
        f"There are {len(found)} network interfaces ({listed}): NCCL and the processes may pick ones that do not reach "
        "each other, and hang.",
        f"export NCCL_SOCKET_IFNAME={physical} (the one that connects the machines) for all processes, and pass "
        "--coordinator_address with an IP address in the same network.",
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


def accelerator_type(environment: Mapping[str, str]) -> str:
    """Return the type of a TPU VM, such as `v3-8`; "" elsewhere. Some images report it only in their metadata."""
    if known := environment.get("TPU_ACCELERATOR_TYPE"):
        return known
    if not device_files(TPU_FILES):
        return ""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/accelerator-type"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with contextlib.suppress(OSError), direct.open(request, timeout=2) as response:
        return response.read(64).decode(errors="replace").strip()
    return ""


def slice_findings(accelerator: str, process_count: int | None) -> Iterator[Finding]:
    """Report several processes on TPU v2-8 or v3-8 hosts, which have no links to other hosts."""
    if accelerator in ("v2-8", "v3-8") and (process_count or 1) > 1:
        generation = accelerator[:2]
        yield error(
            f"This host is a {accelerator}: one machine with 8 cores and no links to others. {process_count} processes "
            f"on several {accelerator} hosts cannot form a slice, and would hang or see only their own cores.",
            f"Run on one host without --process_count, or create a slice: gcloud compute tpus tpu-vm create … "
            f"--accelerator-type={generation}-32.",
        )  # fmt: skip
