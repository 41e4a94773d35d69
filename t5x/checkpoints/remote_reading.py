"""Copies of remote checkpoints (`gs://`, `s3://`, any fsspec URL) in the cache directory.

CACHE/checkpoints/<source>-<version>/    see files/cache_directory.py
  source.txt                             the URL
  checkpoint_1000000/…                   the checkpoint under its own name
"""

import functools
import logging
import os

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import names, paths
from t5x.checkpoints.remote_listing import NATIVE, Listing, list_checkpoint
from t5x.files import hub
from t5x.files.cache_directory import CacheEntry
from t5x.files.disk_space import human_size
from t5x.files.remote import RemotePath, as_local, download
from t5x.files.untrusted import is_plain_relative
from t5x.telemetry import copy_progress

log = logging.getLogger(__name__)


def stage(path: epath.PathLike) -> epath.Path:
    """Return the local path of a checkpoint by its name (see `names`): the path itself, or a copy of a remote one.

        stage("gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000")

    Args:
      path: a local path, which is returned as absolute path; or a remote checkpoint of any format, a prefix or file of
        one, or a MODEL_DIR, of which the newest finished checkpoint is used. A remote checkpoint is copied into the
        cache directory; the copy is reused as long as names, sizes and versions of the remote files stay the same.
        A model of the Hub is kept in the cache of `huggingface_hub`.
    """
    path = names.resolve(path)
    if hub.is_hub_url(path):
        return _of_hub(path)
    if (local := as_local(path)) is not None:
        return paths.local_path(local)
    listing = list_checkpoint(RemotePath.parse(os.fspath(path)))
    entry = CacheEntry("checkpoints", listing.source, listing.version)
    name = listing.directory.name
    copy = epath.Path(entry.path) / (name if is_plain_relative(name) else NATIVE)
    is_complete = functools.partial(_is_complete, copy, listing)
    if not is_complete():
        entry.make(
            is_complete,
            lambda directory: _fill(os.path.join(directory, copy.name), listing),
            lambda: list_checkpoint(listing.path).version,
            resumable=True,
        )
    log.info("%s: reading the copy %s (to free the space: rm -r %s)", listing.source, copy / listing.target, entry.path)
    return copy / listing.target if listing.target else copy


def _of_hub(url: str) -> epath.Path:
    try:
        directory = hub.download(url)
    except hub.ModelNotFound as error:
        raise UserError(f"{error}{names.suggestion(url)}") from error
    log.info("%s: using the copy %s", url, directory)
    return epath.Path(directory)


def _fill(directory: str, listing: Listing) -> None:
    files = {os.path.join(directory, name): file for name, file in listing.files.items()}
    missing = {path: file for path, file in files.items() if _size(path) != file.size}
    size, present = sum(file.size for file in missing.values()), len(files) - len(missing)
    log.info(
        "%s: copying %d file(s), %s, to %s%s (T5X_CACHE_DIR chooses the place)",
        listing.source, len(missing), human_size(size), directory,
        f"; {present} are there from an earlier attempt" if present else "",
    )  # fmt: skip
    with copy_progress(size) as advance:
        download(missing, advance)
    with open(os.path.join(os.path.dirname(directory), "source.txt"), "w") as file:
        file.write(f"{listing.source}\n")


def _is_complete(copy: epath.Path, listing: Listing) -> bool:
    return copy.is_dir() and all(_size(copy / name) == file.size for name, file in listing.files.items())


def _size(path: epath.PathLike) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None
