"""Symbolic links inside a checkpoint: they must not lead out of it."""

import os
from collections.abc import Iterable

from t5x.checkpoints.manifest import DamagedCheckpoint


def check_links(directory: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises DamagedCheckpoint if one of the files is a link to something outside the `allowed` directories.

    Args:
      directory: where the files are.
      names: of files in it; those that are not there do no harm.
      allowed: absolute paths, links resolved.
    """
    roots = [os.path.join(root, "") for root in allowed]
    for name in sorted(names):
        path = os.path.join(directory, name)
        if os.path.islink(path) and not os.path.realpath(path).startswith(tuple(roots)):
            reason = (
                f"{name} is a symbolic link that leads out of it, which is not followed (if it belongs there, copy it)"
            )
            raise DamagedCheckpoint(directory, reason)
