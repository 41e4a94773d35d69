"""Checksums of files."""

import hashlib
import os
from typing import TypedDict

from t5x.untrusted import open_regular


class Digest(TypedDict):
    size: int
    sha256: str


def digest_of(path: str | os.PathLike[str]) -> Digest:
    """Return the size and SHA-256 of a file. Threads hash in parallel: hashlib releases the interpreter lock."""
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": sha256}
