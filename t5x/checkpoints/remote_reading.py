"""Copies of remote checkpoints (`gs://`, `s3://`, any fsspec URL) in the cache directory.

CACHE/checkpoints/                 CACHE is T5X_CACHE_DIR, or ~/.cache/t5x
  <place>-<version>/               a complete copy; another version of the remote files has another name
    source.txt                     its URL
    checkpoint_1000000/…           the checkpoint under its own name
  <place>-<version>.part/          being copied; files left by a killed process are reused
  <place>-<version>.pieces/        incomplete files
  <place>.lock                     one process copies, others wait for it
  upload-…/                        see remote_writing.py
"""

import logging
import os
import posixpath
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etils import epath

from t5x.checkpoints import paths, save_errors
from t5x.checkpoints.remote_listing import NATIVE, Listing, list_checkpoint
from t5x.errors import UserError
from t5x.files import atomic, cache_directory, locks, remote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

_PIECE = 16 * 2**20  # bytes per request: large files use several at once, and memory stays bounded


def stage(path: epath.PathLike) -> epath.Path:
    """Return the local path of a checkpoint: the path itself, or a copy of a remote one.

        stage("gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000")

    Args:
      path: a local path, which is returned as absolute path; or a remote checkpoint of any format, a prefix or file of
        one, or a MODEL_DIR, of which the newest finished checkpoint is used. A remote checkpoint is copied into the
        cache directory; the copy is reused as long as names, sizes and versions of the remote files stay the same.
    """
    if not remote.is_remote(path):
        return paths.local_path(path)
    from fsspec.implementations.local import LocalFileSystem

    url = os.fspath(path).rstrip("/")
    fs, remote_path = remote.file_system(url)
    if isinstance(fs, LocalFileSystem):
        return paths.local_path(remote_path)
    listing = list_checkpoint(fs, remote_path, url)
    entry = home() / f"{listing.place}-{listing.version}"
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
    save_errors.check_space(part, needed)
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
            with remote.explained(url):
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
        remote.all_at_once(fetch, [(name, i * _PIECE) for name, count in left.items() for i in range(count)])


def home() -> epath.Path:
    """Return the directory of the copies and of unfinished uploads."""
    return paths.local_path(cache_directory.root()) / "checkpoints"


def _is_whole(copy: epath.Path, listing: Listing) -> bool:
    return copy.is_dir() and all(_size(copy / name) == size for name, (size, _) in listing.files.items())


def _size(path: epath.Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None
