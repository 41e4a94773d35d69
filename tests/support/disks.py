"""Disks that are really small, and really full."""

import contextlib
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, size: str = "2m") -> Iterator[Path]:
    """A disk of that size there; skips the test where none can be mounted."""
    place.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        gc.collect()  # files that an exception's frames hold open
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Writes a file that leaves no room at all."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler
