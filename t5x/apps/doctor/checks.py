"""The checks of `t5x doctor`. A topic is a function of the arguments that yields findings; see `TOPICS`."""

import argparse
import contextlib
import functools
import glob
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Literal, NamedTuple

from t5x._runtime.errors import UserError
from t5x.files.directory import open_directory
from t5x.files.disk_space import free_bytes, human_size
from t5x.files.remote import is_remote

if TYPE_CHECKING:
    import jax


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
      status: `ok`; `warning` if t5x runs, but slowly or not as expected; `error` if it cannot run.
      message: the observation.
      fix: how to fix the problem.
    """

    status: Literal["ok", "warning", "error"]
    message: str
    fix: str = ""


ok = functools.partial(Finding, "ok")
warning = functools.partial(Finding, "warning")
error = functools.partial(Finding, "error")


# --- Software: Python, packages, drivers and libraries ----------------------------------------------------------------

_SHOWN = ("t5x", "jax", "jaxlib", "flax", "optax", "numpy", "tensorstore", "sentencepiece", "protobuf")
_DRIVER = "/proc/driver/nvidia/version"
_INSTALL = "Run `pip install -e '.[{}]'` in the checkout of t5x."


def check_software(args: argparse.Namespace) -> Iterator[Finding]:
    """Report versions, and combinations that are known not to work."""
    versions = installed()
    yield from python_findings(sys.version_info[:2])
    yield ok("packages: " + ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions))
    yield from package_findings(versions)
    yield from library_findings(versions)


def installed() -> dict[str, str]:
    """Return the version of each installed package, by its name in lower case with `-`."""
    return {
        re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower(): package.version
        for package in metadata.distributions()
        if package.metadata["Name"]
    }


def python_findings(version: tuple[int, int]) -> Iterator[Finding]:
    text = ".".join(map(str, version))
    if (3, 11) <= version < (3, 14):
        yield ok(f"Python {text}")
    else:
        yield error(f"Python is {text}; t5x runs on 3.11, 3.12 and 3.13.", "Create an environment with Python 3.12.")


def package_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Report combinations of versions that do not work together."""
    jax = versions.get("jax", "")
    if not (0, 10, 2) <= _numbers(jax) < (0, 13):
        yield error(f"jax is {jax or 'missing'}; t5x runs with 0.10.2 to 0.12.", "pip install 'jax>=0.10.2,<0.13'")
    plugins = [name for name in versions if name == "jaxlib" or re.fullmatch(r"jax-cuda\d+-(plugin|pjrt)", name)]
    for name in plugins:
        if jax and _numbers(versions[name])[:2] != _numbers(jax)[:2]:
            yield error(
                f"{name} is {versions[name]} but jax is {jax}: they must be of the same release.",
                f"pip install --upgrade jax=={jax} {name}=={jax}",
            )
    cuda = sorted({match[1] for name in plugins if (match := re.search(r"cuda(\d+)", name))})
    if len(cuda) > 1:
        yield error(
            f"JAX's plugins for CUDA {' and '.join(cuda)} are both installed: which one is used depends on chance.",
            f"pip uninstall jax-cuda{cuda[0]}-plugin jax-cuda{cuda[0]}-pjrt",
        )
    sentencepiece, protobuf = versions.get("sentencepiece", "0"), versions.get("protobuf", "0")
    if _numbers(sentencepiece) >= (0, 2, 3) and _numbers(protobuf) < (7,):
        yield error(
            f"sentencepiece {sentencepiece} needs protobuf 7, but {protobuf} is installed: reading a vocabulary fails.",
            "pip install 'sentencepiece<0.2.3'",
        )


def library_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Report the GPU driver, CUDA, cuDNN and libtpu, and JAX packages that are missing for the devices present."""
    has_plugin = any(re.fullmatch(r"jax-cuda\d+-plugin", name) for name in versions)
    if os.path.exists(_DRIVER):
        with open(_DRIVER) as file:
            driver = re.search(r"\d+\.\d+(\.\d+)?", file.readline())
        libraries = [
            f"{name} {versions[package]}"
            for package in sorted(versions)
            if (name := {"nvidia-cudnn": "cuDNN", "nvidia-cuda-runtime": "CUDA", "nvidia-nccl": "NCCL"}.get(
                re.sub(r"-cu\d+$", "", package)))
        ]  # fmt: skip
        yield ok(", ".join([f"NVIDIA driver {driver[0] if driver else 'unknown'}", *libraries]))
        if not has_plugin:
            yield error("This machine has NVIDIA GPUs, but JAX's CUDA plugin is missing.", _INSTALL.format("gpu"))
    elif has_plugin:
        yield warning(
            "JAX's CUDA plugin is installed, but there is no NVIDIA driver.",
            "Install the driver; in a container, start it with --gpus all. Without a GPU, set JAX_PLATFORMS=cpu.",
        )
    if "libtpu" in versions:
        yield ok(f"libtpu {versions['libtpu']}")
    elif glob.glob("/dev/accel*"):
        yield error("This machine has TPU chips, but libtpu is missing.", _INSTALL.format("tpu"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


# --- Network: runs with several processes -----------------------------------------------------------------------------


def check_network(args: argparse.Namespace) -> Iterator[Finding]:
    """Report how several processes would find each other."""
    from t5x.partitioning import cluster

    yield from gpu_binding_findings(os.environ)
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
    if not os.environ.get(cluster.TOKEN):
        yield warning(
            f"{cluster.TOKEN} is not set: whoever reaches process 0 can join the run, or end it.",
            f"export {cluster.TOKEN}=$(openssl rand -hex 16), the same for all processes",
        )


def resolve(name: str) -> list[str]:
    """Return the IP addresses of a host name."""
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def coordinator_findings(host: str, *, is_first: bool) -> Iterator[Finding]:
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


# --- Devices: which JAX uses, who else holds them, and free memory ----------------------------------------------------

GPU_FILES, TPU_FILES = ("/dev/nvidia[0-9]*",), ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_LIMITS = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "JAX_PLATFORMS", "JAX_LOCAL_DEVICE_IDS")


def check_devices(args: argparse.Namespace) -> Iterator[Finding]:
    """Report the devices that JAX uses, the processes that hold them, and free memory."""
    import jax

    yield from holder_findings(holders(TPU_FILES), "TPU chip")
    yield from holder_findings(holders(GPU_FILES), "GPU")
    try:
        devices = jax.local_devices()
    except RuntimeError as problem:
        yield error(
            f"JAX cannot start its devices: {str(problem).splitlines()[0]}",
            "If a process above holds them, end it. Otherwise check the driver, or set JAX_PLATFORMS=cpu.",
        )
        return
    present = len(device_files(GPU_FILES)) or len(device_files(TPU_FILES))
    yield from count_findings([device.device_kind for device in devices], present, os.environ)
    yield from memory_findings(devices)


def holder_findings(commands: Mapping[int, str], device: str) -> Iterator[Finding]:
    """Report processes that hold devices: nobody else can use a TPU chip, and a GPU has less memory.

    Args:
      commands: {process ID: command line}.
      device: `TPU chip` or `GPU`.
    """
    for pid, command in commands.items():
        message = f"Process {pid} ({command}) holds a {device}"
        fix = f"If it is left over from an earlier run, end it: kill {pid} (after 10 seconds: kill -9 {pid})."
        if device == "TPU chip":
            yield error(f"{message}: no other process can use it.", fix)
        else:
            yield warning(f"{message} and may use its memory.", fix)


def count_findings(kinds: list[str], present: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report JAX's devices, and accelerators of the machine that JAX does not use.

    Args:
      kinds: kind of each JAX device of this process.
      present: number of accelerators that the operating system shows.
    """
    from t5x.data.worker_process import available_cores

    limits = ", ".join(f"{name}={environment[name]}" for name in _LIMITS if environment.get(name))
    if kinds[0].lower() == "cpu":
        yield ok(f"{len(kinds)} x {processor()}")
        if present:
            why = f" ({limits})" if limits else ""
            yield error(
                f"The machine has {present} GPU or TPU device(s), but JAX uses the CPU{why}.",
                "Run `pip install -e '.[gpu]'` (or '.[tpu]') in the checkout of t5x, and unset JAX_PLATFORMS.",
            )
        if (allowed := available_cores()) < (cores := os.cpu_count() or 1):
            yield warning(
                f"This process may use {allowed} of {cores} cores.",
                "Check taskset, --cpus-per-task of SLURM and the limits of the container.",
            )
        return
    yield ok(f"{len(kinds)} x {kinds[0]}")
    if len(kinds) < present:
        why = f"because of {limits}" if limits else "and no environment variable says why"
        yield warning(f"JAX uses {len(kinds)} of {present} devices, {why}.", "Unset the variable, to use all of them.")


def memory_findings(devices: "list[jax.Device]") -> Iterator[Finding]:
    from t5x.partitioning.devices import host_memory

    stats = devices[0].memory_stats() or {}
    host = host_memory()
    sizes = [] if host is None else [f"{human_size(host)} of the host"]
    if "bytes_limit" in stats:
        sizes.insert(0, f"{human_size(stats['bytes_limit'] - stats.get('bytes_in_use', 0))} of each device")
    yield ok(f"free memory: {', '.join(sizes) or 'unknown'}")


def processor() -> str:
    """Return the model of the CPU, and how many cores this process may use."""
    from t5x.data.worker_process import available_cores

    name = "cpu"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {available_cores()} cores"


def device_files(patterns: tuple[str, ...]) -> list[str]:
    """Return the files that match one of the patterns."""
    return [path for pattern in patterns for path in glob.glob(pattern)]


def holders(patterns: tuple[str, ...]) -> dict[int, str]:
    """Return {process ID: command line} of the other processes that have one of these files open."""
    devices, commands = set(device_files(patterns)), {}
    for entry in glob.glob("/proc/[0-9]*/fd") if devices else ():
        pid = int(entry.split("/")[2])
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            if pid != os.getpid() and any(os.readlink(f"{entry}/{fd}") in devices for fd in os.listdir(entry)):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    commands[pid] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    return commands


# --- Storage: disks, remote directories and the compilation cache -----------------------------------------------------

_BYTES = 2**27
_MIN_SPEED = 50e6  # bytes/s
_MIN_FREE = 20e9  # bytes: a few checkpoints of a large model
_PROBE = ".t5x-doctor"


def check_storage(args: argparse.Namespace) -> Iterator[Finding]:
    """Report space and speed of `--path`, where runs will be written, and the compilation cache."""
    yield from remote_findings(args.path) if is_remote(args.path) else disk_findings(args.path)
    yield from cache_findings()


def disk_findings(directory: str, size: int = _BYTES) -> Iterator[Finding]:
    """Write, flush and remove a file."""
    name = os.path.abspath(directory)
    try:
        free = free_bytes(name)
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=name) as file:
            file.write(os.urandom(2**20) * (size // 2**20))
            file.flush()
            os.fsync(file.fileno())
            speed = size / (time.perf_counter() - began)
    except OSError as problem:
        yield error(f"{name} cannot be written: {problem.strerror}.", "Choose another directory with --path.")
        return
    text = f"{name}: {'' if free is None else human_size(free) + ' free, '}{human_size(speed)}/s written and flushed"
    if free is not None and free < _MIN_FREE:
        yield warning(f"{text}: little space.", "Free some, or keep fewer checkpoints (SaveCheckpointConfig.keep).")
    elif speed < _MIN_SPEED:
        yield warning(f"{text}: checkpoints of large models take long.", "Use a local SSD, or gs:// or s3://.")
    else:
        yield ok(text)


def remote_findings(url: str) -> Iterator[Finding]:
    """Write, read and remove an object."""
    content = os.urandom(2**20)
    began = time.perf_counter()
    try:
        directory = open_directory(url)
        directory.check_writable()
        directory.write_bytes(_PROBE, content)
        same = directory.read_bytes(_PROBE) == content
        directory.remove(_PROBE)
    except (UserError, OSError) as problem:
        yield error(f"{url} cannot be used: {problem}", "Check the name, the credentials and the network.")
        return
    seconds = time.perf_counter() - began
    if same:
        yield ok(f"{url}: 1 MB written, read and removed in {seconds:.2g} s")
    else:
        yield error(f"{url} returned other bytes than were written.", "Do not store checkpoints there.")


def cache_findings() -> Iterator[Finding]:
    """Report where compiled programs are kept."""
    import jax

    from t5x.partitioning import multiprocess

    multiprocess.enable_compilation_cache()
    directory = jax.config.values["jax_compilation_cache_dir"]
    if not jax.config.values["jax_enable_compilation_cache"]:
        yield warning("The compilation cache is disabled.", "Unset JAX_ENABLE_COMPILATION_CACHE.")
    elif is_remote(directory):
        yield ok(f"compilation cache: {directory}")
    else:
        try:
            os.makedirs(directory, exist_ok=True)
            sizes = [entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()]
            with tempfile.TemporaryFile(dir=directory):
                yield ok(f"compilation cache: {directory}, {len(sizes)} files, {human_size(sum(sizes))}")
        except OSError as problem:
            yield warning(
                f"The compilation cache {directory} cannot be written ({problem.strerror}): programs compile again.",
                "Set JAX_COMPILATION_CACHE_DIR to a writable directory.",
            )


TOPICS = {"software": check_software, "network": check_network, "devices": check_devices, "storage": check_storage}
