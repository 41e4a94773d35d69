"""Check the devices of this machine: which JAX uses, who else holds them, and free memory."""

import argparse
import contextlib
import glob
import os
from collections.abc import Iterator, Mapping

import jax

from t5x.apps.doctor import Finding, error, ok, warning
from t5x.files.disk_space import human_size
from t5x.partitioning.devices import host_memory

GPU_FILES, TPU_FILES = ("/dev/nvidia[0-9]*",), ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_LIMITS = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "JAX_PLATFORMS", "JAX_LOCAL_DEVICE_IDS")


def check(args: argparse.Namespace) -> Iterator[Finding]:
    """Report the devices that JAX uses, the processes that hold them, and free memory."""
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
    limits = ", ".join(f"{name}={environment[name]}" for name in _LIMITS if environment.get(name))
    if kinds[0].lower() == "cpu":
        yield ok(f"{len(kinds)} x {processor()}")
        if present:
            why = f" ({limits})" if limits else ""
            yield error(
                f"The machine has {present} GPU or TPU device(s), but JAX uses the CPU{why}.",
                "Run `pip install -e '.[gpu]'` (or '.[tpu]') in the checkout of t5x, and unset JAX_PLATFORMS.",
            )
        cores = os.cpu_count() or 1
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
        if allowed < cores:
            yield warning(
                f"This process may use {allowed} of {cores} cores.",
                "Check taskset, --cpus-per-task of SLURM and the limits of the container.",
            )
        return
    yield ok(f"{len(kinds)} x {kinds[0]}")
    if len(kinds) < present:
        why = f"because of {limits}" if limits else "and no environment variable says why"
        yield warning(f"JAX uses {len(kinds)} of {present} devices, {why}.", "Unset the variable, to use all of them.")


def memory_findings(devices: list[jax.Device]) -> Iterator[Finding]:
    stats = devices[0].memory_stats() or {}
    host = host_memory()
    sizes = [] if host is None else [f"{human_size(host)} of the host"]
    if "bytes_limit" in stats:
        sizes.insert(0, f"{human_size(stats['bytes_limit'] - stats.get('bytes_in_use', 0))} of each device")
    yield ok(f"free memory: {', '.join(sizes) or 'unknown'}")


def processor() -> str:
    """Return the model of the CPU, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = "cpu"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {cores} cores"


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
