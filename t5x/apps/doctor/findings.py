"""The result of a check."""

import contextlib
import glob
import os
from typing import Literal, NamedTuple


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


def ok(message: str) -> Finding:
    return Finding("ok", message)


def warning(message: str, fix: str) -> Finding:
    return Finding("warning", message, fix)


def error(message: str, fix: str) -> Finding:
    return Finding("error", message, fix)


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
