"""Upload checkpoints to remote paths (`gs://`, `s3://`, any fsspec URL).

While a checkpoint is written, a file UNFINISHED in its directory is the lease of the program that writes. A directory
with that file and without the one that identifies a checkpoint was left by a program that was killed: the next one
removes its files.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.remote_listing import HUGGINGFACE, NATIVE, is_checkpoint
from t5x.errors import UserError
from t5x.files.disk_space import human_size
from t5x.files.lease import Lease
from t5x.files.remote import RemotePath, retried, run_concurrently
from t5x.files.remote_directory import upload_directory
from t5x.files.remote_errors import explained
from t5x.telemetry import copy_progress

if TYPE_CHECKING:
    from fsspec import Callback

log = logging.getLogger(__name__)


@contextlib.contextmanager
def writing(url: str, *, overwrite: bool) -> Iterator[epath.Path]:
    """Yield a local path for a checkpoint that is uploaded to `url` if the block succeeds.

        with writing("gs://bucket/flan", overwrite=False) as path:
            write_huggingface(path, …)

    The local path does not exist yet. See `_publish` for what is replaced, and when.
    """
    destination = RemotePath.parse(url)
    exists = _check_destination(destination, overwrite)
    with upload_directory() as directory, Lease.acquire(f"{destination.url}/{paths.UNFINISHED}", url) as lease:
        if not exists:
            clear(destination)  # what a killed program left
        path = epath.Path(directory) / destination.name
        yield path
        lease.check()
        _publish(path, destination, lease.check, overwrite=overwrite)


def _publish(directory: epath.PathLike, destination: RemotePath, check: Callable[[], None], *, overwrite: bool) -> None:
    """Copy a local checkpoint to a remote path.

    The file that makes it valid is copied last, after the sizes of all others are verified. On failure, the copied
    files are removed. An existing checkpoint is removed only when the new one is complete beside it.
    """
    exists = _check_destination(destination, overwrite)
    sizes = {name: status.st_size for name, status in paths.walk(directory)}
    target = destination.parent / f"{destination.name}.{paths.UNFINISHED}" if exists else destination
    log.info("copying %d file(s), %s, to %s", len(sizes), human_size(sum(sizes.values())), destination.url)
    try:
        if exists:
            clear(target)  # what a killed program left
        upload(directory, target, check)
    except BaseException:
        _try_to_clear(target, check)
        raise
    if exists:
        try:
            check()
            clear(destination)
            copy(target, destination, check)
        except UserError as error:
            raise UserError(f"{error} The new checkpoint is complete at {target.url}: move it.") from error
        _try_to_clear(target, check)
    log.info("wrote %s", destination.url)


def _allow() -> None:
    """Do nothing: nobody else writes there."""


def upload(directory: epath.PathLike, destination: RemotePath, check: Callable[[], None] = _allow) -> None:
    """Copy a local checkpoint to a remote directory, the file that makes it valid last.

    Args:
      check: raises a UserError if this program may no longer write there.
    """
    sizes = {name: status.st_size for name, status in paths.walk(directory)}
    stopped = threading.Event()
    with copy_progress(sum(sizes.values())) as advance:
        callback = _callback(advance, stopped)
        put = lambda file, name: file.fs.put_file(os.path.join(directory, name), file.path, callback=callback)
        _fill(destination, sizes, put, check, stopped)


def copy(source: RemotePath, destination: RemotePath, check: Callable[[], None] = _allow) -> None:
    """Copy a checkpoint on its server, the file that makes it valid last; `check` as in `upload`."""
    sizes = {name: info["size"] for name, info in source.descendants().items()}
    _fill(destination, sizes, lambda file, name: file.fs.cp_file((source / name).path, file.path), check)


def _fill(
    directory: RemotePath,
    sizes: Mapping[str, int],
    put: Callable[[RemotePath, str], Any],
    check: Callable[[], None],
    stopped: threading.Event | None = None,
) -> None:
    """Copy every file into a remote directory, the one that makes the checkpoint valid last, and verify the sizes."""

    def put_one(name: str) -> None:
        file = directory / name

        def put_once() -> None:
            with explained(file.url):
                put(file, name)

        retried(put_once)

    last = next((name for name in (paths.MANIFEST, HUGGINGFACE, NATIVE) if name in sizes), None)
    for names in ([name for name in sizes if name != last], [name for name in sizes if name == last]):
        check()
        run_concurrently(put_one, [(name,) for name in names], stopped)
        directory.fs.invalidate_cache()
        found = {name: info["size"] for name, info in directory.descendants().items()}
        if wrong := [name for name in names if found.get(name) != sizes[name]]:
            raise UserError(
                f"{(directory / wrong[0]).url} has {found.get(wrong[0])} bytes, not {sizes[wrong[0]]}. Start again."
            )


def _callback(advance: Callable[[int], None], stopped: threading.Event) -> "Callback":
    """Return an fsspec callback that reports progress, and aborts the upload once `stopped` is set."""
    from fsspec import Callback

    class Watch(Callback):
        def relative_update(self, inc: int = 1) -> None:
            if stopped.is_set():
                raise InterruptedError
            advance(inc)

    return Watch()


def _check_destination(path: RemotePath, overwrite: bool) -> bool:
    """Return whether a checkpoint is to be replaced; raise a UserError if something may not be replaced."""
    if "/" not in path.path.strip("/"):
        raise UserError(f"{path.url} is an entire bucket. Name a directory in it: {path.url}/NAME.")
    path.fs.invalidate_cache()
    info = path.info()
    if info is not None and info["type"] == "file":
        raise UserError(f"{path.url} is a file; choose another destination.")
    names = path.children()
    if not path.descendants() or (paths.UNFINISHED in names and not is_checkpoint(names)):
        return False
    if not overwrite:
        raise UserError(f"{path.url} exists already; choose another destination, or pass --overwrite to replace it.")
    if not is_checkpoint(names):
        raise UserError(f"{path.url} is not a checkpoint, so it is not replaced. Choose another destination.")
    return True


def clear(directory: RemotePath) -> None:
    """Remove a checkpoint, the files that identify it first. UNFINISHED stays."""
    directory.fs.invalidate_cache()
    names = [name for name in directory.descendants() if name != paths.UNFINISHED]
    identifying = [name for name in names if is_checkpoint({name: None})]
    for group in (identifying, [name for name in names if name not in identifying]):
        run_concurrently(RemotePath.remove, [(directory / name,) for name in group])


def _try_to_clear(directory: RemotePath, check: Callable[[], None]) -> None:
    try:
        check()
        clear(directory)
    except UserError as error:
        log.warning("%s could not be removed; remove it by hand: %s", directory.url, error)
