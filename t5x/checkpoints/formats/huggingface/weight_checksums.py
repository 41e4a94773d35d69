"""t5x_checksums.json: size and SHA-256 of the weight files, which safetensors itself does not have.

    {"model.safetensors": {"size": 3132688376, "sha256": "…"}}

We write it into every Hugging Face directory, and verify it if it exists. Third-party directories have none: damage
that leaves the header of a safetensors file intact cannot be detected in them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping

from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.formats.huggingface.config_json import read_json
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import open_regular

CHECKSUM_FILE = "t5x_checksums.json"


def write_checksums(directory: epath.Path, digests: Mapping[str, str]) -> None:
    """Write the file for existing weight files, given their SHA-256."""
    content = {name: {"size": os.path.getsize(directory / name), "sha256": digest} for name, digest in digests.items()}
    paths.write_file(directory / CHECKSUM_FILE, (json.dumps(content, indent=2) + "\n").encode())


def verify_checksums(path: str, used: Iterable[str]) -> None:
    """Read the weight files `used`; raise DamagedCheckpoint unless they are as they were written.

    Nothing is verified without t5x_checksums.json.
    """
    if not os.path.lexists(f"{path}/{CHECKSUM_FILE}"):
        return
    records = read_json(f"{path}/{CHECKSUM_FILE}")
    for name in sorted(used):
        record = records.get(name)
        if not isinstance(record, dict):
            raise _damaged(path, f"{CHECKSUM_FILE} has no entry for {name}")
        with open_regular(f"{path}/{name}") as file:
            size = os.fstat(file.fileno()).st_size
            if record.get("size") != size:
                raise _damaged(path, f"{name} has {size} bytes instead of {record.get('size')}")
            if hashlib.file_digest(file, "sha256").hexdigest() != record.get("sha256"):
                raise _damaged(path, f"{name} has changed (SHA-256)")


def _damaged(path: str, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, f"{reason}. If the weights were changed on purpose, delete {CHECKSUM_FILE}")
