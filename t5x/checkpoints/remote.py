"""Checkpoints at remote paths (`gs://`, `s3://`, any fsspec URL): copied to the cache to read, uploaded to write.

CACHE/checkpoints/                 CACHE is T5X_CACHE_DIR, or ~/.cache/t5x
  <place>-<version>/               a complete copy; another version of the remote files has another name
    source.txt                     its URL
    checkpoint_1000000/…           the checkpoint under its own name
  <place>-<version>.part/          being copied; files left by a killed process are reused
  <place>-<version>.pieces/        incomplete files
  <place>.lock                     one process copies, others wait for it
  upload-…/                        a checkpoint being written, before it is uploaded
"""

import contextlib
import logging
import os
import posixpath
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from etils import epath

from t5x import cache_directory, startup, urls
from t5x.checkpoints import faults, paths
from t5x.checkpoints.remote_listing import HUGGINGFACE, NATIVE, Listing, children, is_checkpoint, list_checkpoint
from t5x.errors import UserError
from t5x.files import atomic, locks

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem, Callback

log = logging.getLogger(__name__)

_AT_ONCE = 8  # requests in flight
_PIECE = 16 * 2**20  # bytes per request: large files use several at once, and memory stays bounded


# --- Reading ----------------------------------------------------------------------------------------------------------


def stage(path: epath.PathLike) -> epath.Path:
    """Return the local path of a checkpoint: the path itself, or a copy of a remote one.

        stage("gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000")

    Args:
      path: a local path, which is returned as absolute path; or a remote checkpoint of any format, a prefix or file of
        one, or a MODEL_DIR, of which the newest finished checkpoint is used. A remote checkpoint is copied into the
        cache directory; the copy is reused as long as names, sizes and versions of the remote files stay the same.
    """
    if not urls.is_remote(path):
        return paths.local_path(path)
    from fsspec.implementations.local import LocalFileSystem

    url = os.fspath(path).rstrip("/")
    fs, remote = urls.file_system(url)
    if isinstance(fs, LocalFileSystem):
        return paths.local_path(remote)
    listing = list_checkpoint(fs, remote, url)
    entry = _home() / f"{listing.place}-{listing.version}"
    name = posixpath.basename(listing.directory)
    copy = entry / (name if paths.is_plain_relative(name) else NATIVE)
    if not _is_whole(copy, listing):
        paths.make_directory(entry.parent, "The cache directory (T5X_CACHE_DIR)")
        try:
            with locks.locked(entry.parent / f"{listing.place}.lock"):
                if not _is_whole(copy, listing):  # otherwise the process we waited for has copied it
                    _copy(fs, listing, entry, copy.name)
        except OSError as error:
            raise cache_directory.fault(entry.parent, listing.url, listing.size, error) from error
    log.info("%s: reading the copy %s (to free the space: rm -r %s)", listing.url, copy / listing.wanted, entry)
    return copy / listing.wanted if listing.wanted else copy


def _copy(fs: "AbstractFileSystem", listing: Listing, entry: epath.Path, name: str) -> None:
    part, pieces = (entry.parent / f"{entry.name}.{suffix}" for suffix in ("part", "pieces"))
    for other in entry.parent.glob(f"{listing.place}-*"):
        if other.suffix == "" and other != entry:
            log.info("%s is a copy of an earlier version of %s; rm -r frees it", other, listing.url)
        elif other not in (part, entry):  # not in use: we hold the lock
            atomic.remove_tree(other)
    root = part / name
    missing = {name: size for name, (size, _) in listing.files.items() if _size(root / name) != size}
    needed, present = sum(missing.values()), len(listing.files) - len(missing)
    root.mkdir(parents=True, exist_ok=True)
    faults.check_space(part, needed)
    log.info(
        "%s: copying %d file(s), %s, to %s%s (T5X_CACHE_DIR chooses the place)",
        listing.url, len(missing), paths.human_size(needed), entry,
        f"; {present} are there from an earlier attempt" if present else "",
    )  # fmt: skip
    pieces.mkdir()
    try:
        _fetch(fs, listing, missing, root, pieces)
    finally:
        atomic.remove_tree(pieces)
    if list_checkpoint(fs, listing.path, listing.url).version != listing.version:
        raise UserError(f"{listing.url} was changed while it was being copied. Start again when its writer is done.")
    (part / "source.txt").write_text(f"{listing.url}\n")
    atomic.sync_tree(part)
    atomic.remove_tree(entry)  # exists only if files were removed from it or truncated
    atomic.rename(part, entry)


def _fetch(
    fs: "AbstractFileSystem", listing: Listing, sizes: Mapping[str, int], root: epath.Path, pieces: epath.Path
) -> None:
    """Copy the files of `sizes`; each appears in `root` when it is complete."""
    partial = {name: pieces / str(number) for number, name in enumerate(sizes)}
    left = {name: max(1, -(-size // _PIECE)) for name, size in sizes.items()}
    lock = threading.Lock()

    def fetch(name: str, begin: int) -> None:
        end = min(begin + _PIECE, sizes[name])
        url = f"{fs.unstrip_protocol(listing.directory)}/{name}"
        content = b""
        if end > begin:
            with urls.explained(url):
                content = fs.cat_file(f"{listing.directory}/{name}", start=begin, end=end)
        if len(content) != end - begin:
            raise UserError(
                f"{url}: {len(content)} bytes came instead of {end - begin}. The connection was cut, or the file has "
                "changed. Start again: what is whole is not copied again."
            )
        with os.fdopen(os.open(partial[name], os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.seek(begin)
            file.write(content)
        bar.advance(len(content))
        with lock:
            left[name] -= 1
            is_last = not left[name]
        if is_last:
            atomic.sync(partial[name])
            os.makedirs(os.path.dirname(root / name), exist_ok=True)
            os.replace(partial[name], root / name)

    with cache_directory.CopyProgress(sum(sizes.values())) as bar:
        _all_at_once(fetch, [(name, i * _PIECE) for name, count in left.items() for i in range(count)])


# --- Writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(url: str, *, overwrite: bool) -> Iterator[epath.Path]:
    """Yield a local path for a checkpoint that is uploaded to `url` if the block succeeds.

        with writing("gs://bucket/flan", overwrite=False) as path:
            write_huggingface(path, …)

    The local path does not exist yet. See `publish` for what is replaced, and when.
    """
    url = url.rstrip("/")
    _check_destination(*urls.file_system(url), url, overwrite)
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
    fs, path = urls.file_system(url)
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
            with urls.explained(url):
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
        with urls.explained(f"{url}/{name}"):
            put(name)

    last = next((name for name in (paths.MANIFEST, HUGGINGFACE, NATIVE) if name in sizes), None)
    for names in ([name for name in sizes if name != last], [name for name in sizes if name == last]):
        _all_at_once(put_one, [(name,) for name in names], stopped)
        with urls.explained(url):
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
    with urls.explained(url):
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
    home = paths.make_directory(_home(), "The cache directory (T5X_CACHE_DIR)")
    with contextlib.ExitStack() as held:
        with locks.locked(home / "upload.lock"):
            for left in home.glob("upload-*"):
                with contextlib.suppress(BlockingIOError), locks.locked(left, wait=False):
                    atomic.remove_tree(left)
            directory = held.enter_context(tempfile.TemporaryDirectory(prefix="upload-", dir=home))
            held.enter_context(locks.locked(directory))
        yield epath.Path(directory)


# --- Both -------------------------------------------------------------------------------------------------------------


def _all_at_once(call: Callable[..., None], arguments: Sequence[tuple], stopped: threading.Event | None = None) -> None:
    """Call with each of the arguments, several at a time. The first failure cancels the rest and sets `stopped`."""
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="t5x-remote")
    try:
        for future in as_completed([pool.submit(call, *given) for given in arguments]):
            future.result()
    except BaseException:
        if stopped is not None:
            stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _home() -> epath.Path:
    return paths.local_path(startup.cache_directory()) / "checkpoints"


def _is_whole(copy: epath.Path, listing: Listing) -> bool:
    return copy.is_dir() and all(_size(copy / name) == size for name, (size, _) in listing.files.items())


def _size(path: epath.Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None
