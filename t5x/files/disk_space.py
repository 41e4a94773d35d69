"""Free space on disks, and sizes for messages."""

import errno
import os


def check_space(directory: str | os.PathLike[str], needed: int) -> None:
    """Raise the error of a full disk before gigabytes are written to it."""
    free = free_bytes(directory)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {human_size(needed)} needed", os.fspath(directory))


def free_bytes(directory: str | os.PathLike[str]) -> int | None:
    """Return the bytes that we may still write on the disk of `directory`; None if unknown."""
    disk = os.statvfs(directory)
    if not disk.f_blocks:
        return None
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)


def human_size(size: float) -> str:
    """Return a size with its unit.

    >>> human_size(1234567)
    '1.2 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
