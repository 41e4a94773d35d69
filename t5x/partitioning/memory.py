"""Free memory of the devices and of the host."""

import contextlib

import jax


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
