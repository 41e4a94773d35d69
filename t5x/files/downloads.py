"""Download remote files in chunks."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping

from t5x.files import atomic
from t5x.files.disk_space import free_bytes, human_size
from t5x.files.remote import RemoteFile, run_concurrently

_CHUNK = 8 * 2**20  # bytes per request: large files use several at once, and memory stays bounded


def download(files: Mapping[str, RemoteFile], advance: Callable[[int], None]) -> None:
    """Copy remote files to local paths. Each file appears, flushed to the disk, when it is complete.

    If one fails, the others are cancelled and complete ones are kept: to resume, pass only those that are missing.

    Args:
      files: {local path: remote file}.
      advance: called with the number of bytes of every chunk, from several threads.
    """
    partial = {target: atomic.unique_name(target) for target in files}
    chunks = {target: range(0, max(file.size, 1), _CHUNK) for target, file in files.items()}
    remaining = {target: len(starts) for target, starts in chunks.items()}
    lock = threading.Lock()

    def fetch(target: str, start: int) -> None:
        content = files[target].read(start, min(start + _CHUNK, files[target].size))
        descriptor = os.open(partial[target], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(start)
            file.write(content)
        advance(len(content))
        with lock:
            remaining[target] -= 1
            is_complete = not remaining[target]
        if is_complete:
            atomic.sync(partial[target])
            os.replace(partial[target], target)

    directories = sorted({os.path.dirname(target) for target in files})
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
    needed = sum(file.size for file in files.values())
    if needed and (free := free_bytes(directories[0])) is not None and free < needed:
        raise OSError(errno.ENOSPC, f"{human_size(needed)} needed", directories[0])
    try:
        run_concurrently(fetch, [(target, start) for target, starts in chunks.items() for start in starts])
    finally:
        for path in partial.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
