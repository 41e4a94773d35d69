"""The t5x that a cloud machine installs: a copy of a source directory, or a pip requirement."""

import os
import tarfile
from pathlib import Path
from typing import Any

from t5x._runtime.version import PACKAGE
from t5x.errors import UserError
from t5x.launching.accelerators import Accelerators

# Images of clouds may have an old Python: uv fetches one that t5x supports.
INSTALL_SCRIPT = """\
uv=$(command -v uv || echo ~/.local/bin/uv)
[ -x "$uv" ] || python3 -m pip install --quiet --user uv
"$uv" venv --quiet --allow-existing --python '>=3.11,<3.14' env
"$uv" pip install --quiet --python env/bin/python @REQUIREMENT@
"""


def add_package_arguments(parser: Any) -> None:
    parser.add_argument(
        "--package", metavar="X", help="t5x to install: a directory with its source, or a pip requirement (this one)"
    )
    parser.add_argument(
        "--extras", metavar="A,B", help="extras to install with a source directory (gcs, and tpu or gpu)"
    )


def find_package(args: Any, devices: Accelerators) -> tuple[Path | None, str]:
    """Return the directory of the source to copy, if any, and the requirement to install."""
    extras = args.extras or ("tpu,gcs" if devices.tpu else "gpu,gcs")
    package = args.package or os.path.dirname(PACKAGE)
    if os.path.isdir(package):
        if not os.path.exists(os.path.join(package, "pyproject.toml")):
            raise UserError(
                f"{package} has no pyproject.toml, so t5x cannot be installed from it. Pass --package with a checkout "
                "of t5x or a pip requirement, as in 't5x[tpu,gcs] @ git+https://…'."
            )
        return Path(package), f"./package[{extras}]"
    if os.sep in package and "://" not in package:
        raise UserError(f"--package {package}: there is no such directory.")
    return None, package


def add_source(archive: tarfile.TarFile, source: Path) -> None:
    """Add the source of t5x as `package/`."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "t5x"):
        archive.add(source / name, f"package/{name}", filter=without_caches)


def without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name.split("/") else entry
