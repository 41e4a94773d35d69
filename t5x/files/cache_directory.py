"""The cache directory (T5X_CACHE_DIR, or ~/.cache/t5x): copies of remote or compressed files, made once.

CACHE/KIND/                        data (see local_copies.py), checkpoints (see checkpoints/remote_reading.py)
  <source>-<version>/              a complete copy; another version of the source has another name
  <source>-<version>.part/         being made, or left by a failed attempt, which the next one resumes
  <source>.lock                    one process makes the copy, others wait for it
"""

import contextlib
import errno
import glob
import hashlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from t5x._runtime.errors import UserError
from t5x.files import atomic, locks
from t5x.files.disk_space import free_bytes, human_size
from t5x.files.remote import is_remote

log = logging.getLogger(__name__)


def root() -> str:
    """Return T5X_CACHE_DIR, or `t5x` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("T5X_CACHE_DIR") or os.path.join(home, "t5x")


def place(name: str) -> str:
    """Return the path of the subdirectory `name` of the cache directory; it need not exist."""
    home = os.path.expanduser(root())
    if is_remote(home):
        raise UserError(f"The cache directory (T5X_CACHE_DIR) {home} is remote. Name a local directory.")
    return os.path.join(os.path.abspath(home), name)


def make(name: str) -> str:
    """Create and return `place(name)`."""
    directory = place(name)
    try:
        atomic.make_directories(directory)
    except OSError as error:
        raise UserError(
            f"The cache directory (T5X_CACHE_DIR) {directory} cannot be created: {error.strerror}. Choose another path."
        ) from error
    return directory


class CacheEntry(NamedTuple):
    """A versioned copy in the cache directory.

    Attributes:
      kind: subdirectory of the cache directory.
      source: the path or URL of what is copied.
      version: changes when the source changes.
    """

    kind: str
    source: str
    version: str

    @property
    def path(self) -> str:
        return f"{self._prefix}-{short_hash(self.version)}"

    @property
    def lock(self) -> str:
        return f"{self._prefix}.lock"

    def make(
        self,
        is_complete: Callable[[], bool],
        fill: Callable[[str], None],
        current_version: Callable[[], str],
        *,
        resumable: bool,
    ) -> None:
        """Make the copy, unless another process makes it meanwhile.

        Args:
          is_complete: returns whether the copy exists.
          fill: writes the files to the directory it is given.
          current_version: returns the version of the source, to detect a change during the copy.
          resumable: keep the files of a failed attempt for `fill` in the next one.
        """
        home, partial = make(self.kind), f"{self.path}.part"
        try:
            with locks.locked(self.lock), contextlib.ExitStack() as at_exit:
                if is_complete():
                    return
                self._clean_up(partial)
                if not resumable:
                    at_exit.callback(atomic.remove_tree, partial)
                os.makedirs(partial, exist_ok=True)
                fill(partial)
                if current_version() != self.version:
                    raise UserError(
                        f"{self.source} was changed while it was being copied. Start again when its writer is done."
                    )
                atomic.sync_tree(partial)
                atomic.remove_tree(self.path)
                atomic.rename(partial, self.path)
        except OSError as error:
            raise copy_error(home, self.source, error) from error

    @property
    def _prefix(self) -> str:
        return os.path.join(place(self.kind), short_hash(self.source))

    def _clean_up(self, partial: str) -> None:
        """Remove unfinished copies of other versions. The caller holds the lock, so they are not in use."""
        for other in glob.glob(f"{glob.escape(self._prefix)}-*"):
            if other == self.path:
                log.warning("%s: the copy in %s has changed since it was made; it is made again", self.source, other)
            elif "." not in os.path.basename(other):
                log.info("%s is a copy of an earlier version of %s; rm -r frees the space", other, self.source)
            elif other != partial:
                atomic.remove_tree(other)
        for directory, _, names in os.walk(partial):
            for name in filter(atomic.is_temporary, names):
                os.unlink(os.path.join(directory, name))


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def copy_error(directory: str, name: str, error: OSError) -> UserError:
    """Return the error to raise when `name` could not be copied to `directory`."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{name} could not be copied to {directory}: {error.strerror or error}. Set T5X_CACHE_DIR to a directory "
            "that you may write to."
        )
    free = free_bytes(directory)
    available = "" if free is None else f", {human_size(free)} free"
    return UserError(
        f"{name} does not fit on the disk of {directory} ({error.strerror}{available}). Remove copies that you no "
        "longer need, or set T5X_CACHE_DIR to a directory on a larger disk."
    )
