"""Upload checkpoints to remote paths (`gs://`, `s3://`, any fsspec URL)."""

import contextlib
import logging
import os
import posixpath
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from etils import epath

from t5x.checkpoints import paths, remote_reading
from t5x.checkpoints.remote_listing import HUGGINGFACE, NATIVE, children, is_checkpoint
from t5x.errors import UserError
from t5x.files import atomic, cache_directory, locks, remote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem, Callback

log = logging.getLogger(__name__)


@contextlib.contextmanager
def writing(url: str, *, overwrite: bool) -> Iterator[epath.Path]:
    """Yield a local path for a checkpoint that is uploaded to `url` if the block succeeds.

        with writing("gs://bucket/flan", overwrite=False) as path:
            write_huggingface(path, …)

    The local path does not exist yet. See `publish` for what is replaced, and when.
    """
    url = url.rstrip("/")
    _check_destination(*remote.file_system(url), url, overwrite)
    with _upload_directory() as directory:
        path = directory / posixpath.basename(url)
        yield path
        publish(path, url, overwrite=overwrite)


def publish(directory: epath.PathLike, url: str, *, overwrite: bool) -> None:
    """Copy a local checkpoint to a remote path.

    The file that makes it valid is copied last, after the sizes of all others are verified. On failure, the copied
    files are removed. An existing checkpoint is removed only when the new one is complete beside it.
    """
    url = url.rstrip("/")
    fs, path = remote.file_system(url)
    exists = _check_destination(fs, path, url, overwrite)
    sizes = {name: status.st_size for name, status in paths.walk(directory)}
    beside = f"{path}.new-{secrets.token_hex(4)}" if exists else path
    log.info("copying %d file(s), %s, to %s", len(sizes), paths.human_size(sum(sizes.values())), url)
    stopped = threading.Event()
    try:
        with cache_directory.CopyProgress(sum(sizes.values())) as bar:
            callback = _watch(bar, stopped)
            put = lambda name: fs.put_file(os.path.join(directory, name), f"{beside}/{name}", callback=callback)
            _fill(fs, beside, sizes, put, stopped)
    except BaseException:
        _remove(fs, beside)
        raise
    if exists:
        try:
            with remote.explained(url):
                fs.rm(path, recursive=True)
            _fill(fs, path, sizes, lambda name: fs.cp_file(f"{beside}/{name}", f"{path}/{name}"))
        except UserError as error:
            whole = fs.unstrip_protocol(beside)
            raise UserError(f"{error} The new checkpoint is whole at {whole}: move it.") from error
        _remove(fs, beside)
    log.info("wrote %s", url)


def _fill(
    fs: "AbstractFileSystem",
    path: str,
    sizes: Mapping[str, int],
    put: Callable[[str], Any],
    stopped: threading.Event | None = None,
) -> None:
    """Put every file into a remote directory, the one that identifies a checkpoint last; verify the sizes."""
    url = fs.unstrip_protocol(path)

    def put_one(name: str) -> None:
        with remote.explained(f"{url}/{name}"):
            put(name)

    last = next((name for name in (paths.MANIFEST, HUGGINGFACE, NATIVE) if name in sizes), None)
    for names in ([name for name in sizes if name != last], [name for name in sizes if name == last]):
        remote.all_at_once(put_one, [(name,) for name in names], stopped)
        with remote.explained(url):
            fs.invalidate_cache()
            found = {name.removeprefix(f"{path}/"): info["size"] for name, info in fs.find(path, detail=True).items()}
        if wrong := [name for name in names if found.get(name) != sizes[name]]:
            raise UserError(f"{url}/{wrong[0]} has {found.get(wrong[0])} bytes, not {sizes[wrong[0]]}. Start again.")


def _watch(bar: cache_directory.CopyProgress, stopped: threading.Event) -> "Callback":
    """Return an fsspec callback that advances the bar, and aborts the upload once `stopped` is set."""
    from fsspec import Callback

    class Watch(Callback):
        def relative_update(self, inc: int = 1) -> None:
            if stopped.is_set():
                raise InterruptedError
            bar.advance(inc)

    return Watch()


def _check_destination(fs: "AbstractFileSystem", path: str, url: str, overwrite: bool) -> bool:
    """Return whether a checkpoint is to be replaced; raise a UserError if something may not be replaced."""
    if "/" not in path.strip("/"):
        raise UserError(f"{url} is a whole bucket. Name a directory in it: {url}/NAME.")
    with remote.explained(url):
        fs.invalidate_cache()
        if fs.isfile(path):
            raise UserError(f"{url} is a file; choose another destination.")
        if not fs.find(path):
            return False
        if not overwrite:
            raise UserError(f"{url} exists already; choose another destination, or give --overwrite to replace it.")
        if not is_checkpoint(children(fs, path)):
            raise UserError(f"{url} exists and is no checkpoint: it is not replaced. Choose another destination.")
    return True


def _remove(fs: "AbstractFileSystem", path: str) -> None:
    try:
        fs.invalidate_cache()
        if fs.exists(path):
            fs.rm(path, recursive=True)
    except Exception as error:
        log.warning("%s could not be removed (%s). Remove it by hand.", fs.unstrip_protocol(path), error)


@contextlib.contextmanager
def _upload_directory() -> Iterator[epath.Path]:
    """Yield a fresh directory in the cache; remove those of killed processes."""
    home = paths.make_directory(remote_reading.home(), "The cache directory (T5X_CACHE_DIR)")
    with contextlib.ExitStack() as held:
        with locks.locked(home / "upload.lock"):
            for left in home.glob("upload-*"):
                with contextlib.suppress(BlockingIOError), locks.locked(left, wait=False):
                    atomic.remove_tree(left)
            directory = held.enter_context(tempfile.TemporaryDirectory(prefix="upload-", dir=home))
            held.enter_context(locks.locked(directory))
        yield epath.Path(directory)
