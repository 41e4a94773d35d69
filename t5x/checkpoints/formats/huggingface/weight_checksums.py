"""t5x_checksums.json: size and SHA-256 of the weight files, which safetensors itself does not have.

    {"model.safetensors": {"size": 3132688376, "sha256": "…"}}

We write it into every Hugging Face directory, and verify it if it exists. Third-party directories have none: damage
that leaves the header of a safetensors file intact cannot be detected in them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats.huggingface.safetensors_files import open_file
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import parse_json

FILE = "t5x_checksums.json"
_MAX_BYTES = 2**24


def write(directory: epath.Path, digests: Mapping[str, str]) -> None:
    """Write the file for existing weight files, given their SHA-256."""
    content = {name: {"size": os.path.getsize(directory / name), "sha256": digest} for name, digest in digests.items()}
    paths.write_file(directory / FILE, (json.dumps(content, indent=2) + "\n").encode())


def verify(path: str, used: Iterable[str]) -> None:
    """Read the weight files; raise DamagedCheckpoint unless they are as they were written.

    Args:
      path: the directory, local or remote. Nothing is verified without t5x_checksums.json.
      used: names of its weight files.
    """
    directory = epath.Path(path)
    if not (directory / FILE).exists():
        return
    records = _read(path)
    for name in sorted(used):
        record = records.get(name)
        if record is None:
            raise _damaged(path, f"{FILE} does not speak of {name}")
        size = (directory / name).stat().length
        if record.get("size") != size:
            raise _damaged(path, f"{name} has {size} bytes instead of {record.get('size')}")
    for name in sorted(used):
        with open_file(f"{path}/{name}") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != records[name].get("sha256"):
                raise _damaged(path, f"{name} has changed (SHA-256)")


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        with open_file(f"{path}/{FILE}") as file:
            records = parse_json(file.read(_MAX_BYTES))
    except ValueError:
        records = None
    if not isinstance(records, dict) or not all(isinstance(record, dict) for record in records.values()):
        raise _damaged(path, f"{FILE} is not a JSON object of files")
    return records


def _damaged(path: epath.PathLike, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, f"{reason}; if the weights were changed on purpose, delete {FILE}")
