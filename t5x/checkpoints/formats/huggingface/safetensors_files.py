"""Safetensors files: read with the safetensors library, written tensor by tensor as they arrive.

Files are untrusted. The library checks that the tensors fill the file exactly, without holes or overlaps; what it
trusts is checked here: that the file is a regular one, the size of its header, and that names occur once.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.checkpoints.formats.huggingface.config_json import read_json
from t5x.checkpoints.formats.safety import check_shape
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import open_regular, parse_json

_MAX_HEADER_BYTES = 16 * 2**20  # a T5 11B's header has 0.1 MB
_CHUNK_BYTES = 2**24

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
      kind: the format's name of its dtype.
      position: of its first byte in the file.
    """

    path: str
    name: str
    kind: str
    shape: tuple[int, ...]
    position: int = 0

    @property
    def dtype(self) -> np.dtype:
        if self.kind not in DTYPES:
            raise UserError(
                f"{self.path}: tensor {self.name} is {self.kind}, so the checkpoint is quantised. Only "
                f"{', '.join(DTYPES)} can be read: use the original checkpoint, or dequantise this one."
            )
        return DTYPES[self.kind]

    def read(self) -> np.ndarray:
        """Return the whole tensor in a new array."""
        value = np.empty(self.shape, self.dtype)
        # Without the library, which copies a tensor twice.
        with _read_errors(self.path), open_regular(self.path) as file:
            file.seek(self.position)
            if file.readinto(value.reshape(-1).view(np.uint8).data) != value.nbytes:
                raise ValueError(f"it ends within tensor {self.name}")
        return value

    def same_content(self, other: "Tensor") -> bool:
        """Return whether both have the same type, shape and bytes; reads only until they differ."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        size = math.prod(self.shape) * self.dtype.itemsize
        with _read_errors(self.path), open_regular(self.path) as file, open_regular(other.path) as other_file:
            file.seek(self.position)
            other_file.seek(other.position)
            chunks = (min(_CHUNK_BYTES, size - start) for start in range(0, size, _CHUNK_BYTES))
            return all(file.read(chunk) == other_file.read(chunk) for chunk in chunks)


def read_header(path: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raise a UserError unless it is a complete, valid safetensors file."""
    with _read_errors(path), open_regular(path) as raw:
        length = int.from_bytes(raw.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes is too large")
        with safe_open(path, framework="numpy") as file:
            header = parse_json(raw.read(length), max_bytes=_MAX_HEADER_BYTES, object_pairs_hook=_check_unique)
            tensors = {}
            for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                tensor, position = file.get_slice(name), 8 + length + header[name]["data_offsets"][0]
                tensors[name] = Tensor(path, name, tensor.get_dtype(), check_shape(tensor.get_shape()), position)
            return tensors


@contextlib.contextmanager
def _read_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}. Download it again.") from error


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return unique


def write(path: str | os.PathLike[str], tensors: Mapping[str, LazyArray]) -> str:
    """Write a new file. Tensors are read one at a time and written in chunks, without a copy of the whole array.

    Returns:
      the SHA-256 of the file.
    """
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in kinds:
            raise UserError(f"{name} has dtype {tensor.dtype}; safetensors files hold {', '.join(DTYPES)}.")
        offsets = [position, position + tensor.nbytes]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    preamble = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(preamble)
    with open(path, "xb") as file:
        file.write(preamble)
        for name, tensor in tensors.items():
            value = tensor.read()
            if value.shape != tensor.shape:
                raise UserError(f"The array for {name} has shape {value.shape} instead of {tensor.shape}.")
            rows = _rows_per_chunk(tensor.dtype, tensor.shape)
            for start in range(0, len(value), rows):
                chunk = np.ascontiguousarray(value[start : start + rows], tensor.dtype).reshape(-1).view(np.uint8).data
                digest.update(chunk)
                file.write(chunk)
            del value  # before the next one is read
    return digest.hexdigest()


def _rows_per_chunk(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return max(1, _CHUNK_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))


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
