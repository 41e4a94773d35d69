"""What kind of device a traced program will run on: those of the active mesh, or JAX's default devices."""

import contextlib

import jax
from jax.sharding import AbstractMesh

from t5x.partitioning.logical import active_mesh


def device() -> jax.Device:
    """Return the first device that the traced program will run on."""
    mesh = active_mesh()
    if mesh is not None and not isinstance(mesh, AbstractMesh):
        return mesh.devices.flat[0]
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return jax.devices()[0] if chosen is None else chosen


def device_count() -> int:
    """Return the number of devices that the traced program will run on."""
    mesh = active_mesh()
    return jax.device_count() if mesh is None else mesh.size


def platform() -> str:
    """Return `cpu`, `gpu` or `tpu`."""
    return device().platform


def on_nvidia_gpu() -> bool:
    """Return whether the devices are NVIDIA GPUs."""
    return platform() == "gpu" and "cuda" in device().client.platform_version


def compute_capability() -> float:
    """Return the version of an NVIDIA GPU's architecture; 0.0 for other devices."""
    return float(getattr(device(), "compute_capability", "0"))


def vmem_bytes() -> int:
    """Return the size of the vector memory of a TPU core."""
    from jax.experimental.pallas import tpu  # slow to import

    with jax.default_device(device()):
        return tpu.get_tpu_info().vmem_capacity_bytes


def available_memory() -> float | None:
    """Return the free bytes of all local devices together; on a CPU, of the host. None if unknown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in device for device in stats):
        return float(sum(device["bytes_limit"] - device.get("bytes_in_use", 0) for device in stats))
    return host_memory()


def host_memory() -> float | None:
    """Return the bytes that this process can still allocate on the host; None if unknown."""
    limits = []
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        limits += [1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:  # container limit
        limits.append(float(int(file.read())))
    return min(limits, default=None)
