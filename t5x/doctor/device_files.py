"""Find the device files of accelerators in /dev, and the processes that have them open."""

import contextlib
import glob
import os

GPU_FILES, TPU_FILES = ("/dev/nvidia[0-9]*",), ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


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
