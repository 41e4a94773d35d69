"""The safetensors format: the length of a JSON header (u64, little-endian), the header, the tensors' bytes.

Implemented here rather than with the safetensors library, so that a tensor is read directly from its place in the file
(including bfloat16, which NumPy alone does not support) and written as it arrives, one at a time. Headers are untrusted
and fully checked first: nothing larger than the file is allocated, nothing outside it is read.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from etils import epath

from t5x.errors import UserError
from t5x.files.remote import is_remote
from t5x.files.untrusted import open_regular, parse_json

_LARGEST_HEADER = 16 * 2**20  # a T5 11B's header has 0.1 MB
_CHUNK = 1 << 24

# Sizes in bytes of all types of the format; only the four in DTYPES can be read.
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_SIZES |= {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
_SIZES |= {"I64": 8, "U64": 8, "F64": 8, "C64": 8}
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: the position of its bytes, and their type."""

    path: str
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def dtype(self) -> np.dtype:
        if self.kind not in DTYPES:
            raise UserError(
                f"{self.path}: the tensor {self.name} is {self.kind}, so the checkpoint is quantised. Only "
                f"{', '.join(DTYPES)} can be read: take the original checkpoint, or de-quantise this one."
            )
        return DTYPES[self.kind]

    def read(self) -> np.ndarray:
        """Return the whole tensor in a new array."""
        array = np.empty(self.shape, self.dtype)
        view = array.reshape(-1).view(np.uint8)
        with open_file(self.path) as file:
            file.seek(self.start)
            for offset in range(0, self.size, _CHUNK):
                part = file.read(min(_CHUNK, self.size - offset))
                if len(part) != min(_CHUNK, self.size - offset):
                    raise UserError(f"{self.path} ends inside the tensor {self.name}: it has become shorter.")
                view[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
        return array

    def same_content(self, other: "Tensor") -> bool:
        """Return whether both have the same type, shape and bytes; reads only until they differ."""
        if (self.kind, self.shape) != (other.kind, other.shape):
            return False
        with open_file(self.path) as one, open_file(other.path) as two:
            one.seek(self.start)
            two.seek(other.start)
            steps = range(0, self.size, _CHUNK)
            return all(one.read(n) == two.read(n) for n in (min(_CHUNK, self.size - at) for at in steps))


def read_header(path: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raise a UserError unless it is a complete, valid safetensors file."""
    with open_file(path) as file:
        total = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if total < 8:
            raise UserError(f"{path} has {total} bytes: that is no safetensors file. Fetch it again.")
        if length > min(total - 8, _LARGEST_HEADER):
            raise UserError(
                f"{path} is no safetensors file, or cut short: it announces a header of {length:,} bytes and has "
                f"{total:,} in all. Fetch it again."
            )
        text = file.read(length)
    try:
        header = parse_json(text, max_bytes=_LARGEST_HEADER, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise _broken(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, total)
    return tensors


def _tensor(path: str, name: str, entry: Any, data: int) -> Tensor:
    try:
        kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, end)) or len(shape) > 8:
            raise ValueError("a number out of range, or too many dimensions")
        size = _SIZES[kind] * math.prod(shape)
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"its header says of the tensor {name[:200]!r} {str(entry)[:200]} ({error!r})") from error
    if end - start != size:
        named = f"the tensor {name[:200]!r}, {kind} of shape {shape}"
        raise _broken(path, f"{named}, takes {size:,} bytes, and its header gives it {end - start:,}")
    return Tensor(path, name, kind, tuple(shape), data + start, size)


def _check_layout(path: str, tensors: Mapping[str, Tensor], data: int, total: int) -> None:
    """Raise a UserError unless the tensors lie end to end, from the end of the header to the end of the file."""
    position = data
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != position:
            problem = "overlaps the one before it" if tensor.start < position else "leaves a hole before it"
            raise _broken(path, f"the tensor {tensor.name[:200]!r} {problem}")
        position += tensor.size
    if position != total:
        problem = "is cut short" if position > total else "has bytes that belong to no tensor"
        raise _broken(path, f"the file {problem}: the header speaks of {position:,} bytes, there are {total:,}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _broken(path: str, problem: str) -> UserError:
    return UserError(f"{path} is damaged: {problem}. Fetch it again.")


def open_file(path: str) -> BinaryIO:
    """Open a local or remote file for reading; raise a UserError if it is not a regular file."""
    try:
        return epath.Path(path).open("rb") if is_remote(path) else open_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def kind_of(dtype: np.dtype) -> str:
    """Return the format's name of `dtype`."""
    for kind, known in DTYPES.items():
        if dtype == known:
            return kind
    raise UserError(f"Arrays of {dtype} cannot be written to safetensors: they must be of {', '.join(DTYPES)}.")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tensor to be written: its name, type and shape are known, its values follow later."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write(path: str, plans: Iterable[Plan], values: Iterable[np.ndarray]) -> str:
    """Write a new file: the header from `plans`, then `values` in the same order, one at a time.

    Values are converted to the planned type in parts, so that one array is in memory, without a copy of it.

    Returns:
      the SHA-256 of the file.
    """
    plans = list(plans)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for plan in plans:
        offsets = [position, position + plan.size]
        header[plan.name] = {"dtype": kind_of(plan.dtype), "shape": list(plan.shape), "data_offsets": offsets}
        position += plan.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(start)
    with open(path, "xb") as file:
        file.write(start)
        for plan, value in zip(plans, values, strict=True):
            for part in _parts(plan, value):
                digest.update(part)
                file.write(part)
            del value
    return digest.hexdigest()


def _parts(plan: Plan, value: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in parts."""
    if value.shape != plan.shape:
        raise UserError(f"The array for {plan.name} has the shape {value.shape}; {plan.shape} was announced.")
    rows = max(1, _CHUNK // max(1, plan.dtype.itemsize * math.prod(plan.shape[1:])))
    for start in range(0, len(value), rows):
        yield np.ascontiguousarray(value[start : start + rows], plan.dtype).reshape(-1).view(np.uint8).data
