"""Check that symbolic links inside a checkpoint do not lead out of it."""

import os
from collections.abc import Iterable

from t5x.checkpoints.manifest import DamagedCheckpoint


def check_links(directory: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise DamagedCheckpoint if one of the files is a link to something outside the `allowed` directories.

    Args:
      directory: directory of the files.
      names: names of files in it; missing ones are ignored.
      allowed: absolute paths with links resolved.
    """
    roots = [os.path.join(root, "") for root in allowed]
    for name in sorted(names):
        path = os.path.join(directory, name)
        if os.path.islink(path) and not os.path.realpath(path).startswith(tuple(roots)):
            reason = (
                f"{name} is a symbolic link that leads out of it, which is not followed (if it belongs there, copy it)"
            )
            raise DamagedCheckpoint(directory, reason)
