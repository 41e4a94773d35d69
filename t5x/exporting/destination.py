"""The directory of an export: complete and checked, or absent."""

import contextlib
import errno
import glob
import os
from collections.abc import Iterator

from t5x.errors import UserError
from t5x.files import atomic, locks
from t5x.files.remote import is_remote


@contextlib.contextmanager
def new_destination(path: str) -> Iterator[str]:
    """Yield a directory that becomes `path` if nothing is raised."""
    if is_remote(path):
        raise UserError(f"{path} is remote: export to a local directory, and copy it.")
    if os.path.lexists(path):
        raise UserError(f"{path} exists already. Choose another destination, or remove it.")
    parent = os.path.dirname(os.path.abspath(path))
    try:
        atomic.make_directories(parent)
    except OSError as error:
        raise UserError(f"{path} cannot be created: {error.strerror}. Choose another destination.") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be created: {parent} is not writable. Choose another destination.")
    _remove_unfinished(path)
    try:
        with atomic.new_directory(path) as directory, locks.locked(directory):
            yield directory
    except Exception as error:  # TensorFlow and safetensors have exceptions of their own for a full disk
        full = os.strerror(errno.ENOSPC)
        if isinstance(error, UserError) or full not in str(error):
            raise
        raise UserError(f"{path} cannot be written: {full}. Free disk space, then start again.") from error


def _remove_unfinished(path: str) -> None:
    """Remove the temporaries of killed exports to `path`, which no process holds."""
    for temporary in glob.glob(f"{glob.escape(path)}.tmp-*"):
        if atomic.is_temporary(temporary):
            with contextlib.suppress(OSError), locks.locked(temporary, wait=False):
                atomic.remove_tree(temporary)
