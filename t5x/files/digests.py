"""Checksums of files and buffers."""

import hashlib
import os
from typing import TypedDict

import google_crc32c

from t5x.files.untrusted import open_regular


class Digest(TypedDict):
    size: int
    sha256: str


def digest_of(path: str | os.PathLike[str]) -> Digest:
    """Return the size and SHA-256 of a file. Threads hash in parallel: hashlib releases the interpreter lock."""
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": sha256}


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data` as TensorFlow stores it: masked, because a CRC over data with CRCs would be weak.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
