"""Upload checkpoints to remote paths (`gs://`, `s3://`, any fsspec URL).

While a checkpoint is written, a file UNFINISHED in its directory is the lease of the program that writes. A directory
with that file and without the one that identifies a checkpoint was left by a program that was killed: the next one
removes its files.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.checkpoints.remote_listing import is_checkpoint
from t5x.files.disk_space import human_size
from t5x.files.lease import Lease
from t5x.files.local import Publication
from t5x.files.remote import RemotePath
from t5x.files.remote_directory import RemoteDirectory, upload_directory

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
        publication = dataclasses.replace(paths.CHECKPOINTS, check=lease.check)
        if not exists:
            RemoteDirectory(destination).clear(publication)  # what a killed program left
        path = epath.Path(directory) / destination.name
        yield path
        lease.check()
        _publish(path, destination, publication, overwrite=overwrite)


def _publish(path: epath.PathLike, destination: RemotePath, publication: Publication, *, overwrite: bool) -> None:
    """Copy a local checkpoint to a remote path.

    The file that makes it valid is copied last, after the sizes of all others are verified. On failure, the copied
    files are removed. An existing checkpoint is removed only when the new one is complete beside it.
    """
    exists = _check_destination(destination, overwrite)
    sizes = [status.st_size for _, status in paths.walk(path)]
    final = RemoteDirectory(destination)
    target = RemoteDirectory(destination.parent) / f"{destination.name}.{paths.UNFINISHED}" if exists else final
    log.info("copying %d file(s), %s, to %s", len(sizes), human_size(sum(sizes)), final)
    try:
        if exists:
            target.clear(publication)  # what a killed program left
        target.upload(path, publication)
    except BaseException:
        _try_to_clear(target, publication)
        raise
    if exists:
        try:
            publication.check()
            final.clear(publication)
            final.copy_from(target, publication)
        except UserError as error:
            raise UserError(f"{error} The new checkpoint is complete at {target}: move it.") from error
        _try_to_clear(target, publication)
    log.info("wrote %s", final)


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


def _try_to_clear(directory: RemoteDirectory, publication: Publication) -> None:
    try:
        publication.check()
        directory.clear(publication)
    except UserError as error:
        log.warning("%s could not be removed; remove it by hand: %s", directory, error)
