"""Reads the arrays of `state/` from their files, without TensorStore.

TensorStore reports the file and offset of each chunk. It could also read them, but takes four times as long: it copies
each chunk twice and opens each array separately. Uncompressed chunks, the only kind that we write, are read here
directly into the memory of the array.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import tensorstore as ts
from etils import epath

from t5x.checkpoints.formats import zarr_arrays
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import open_inside

log = logging.getLogger(__name__)

Bounds = tuple[tuple[int, int], ...]  # (begin, end) in every dimension

_MAX_METADATA_BYTES = 2**20  # per array
_PLACE = re.compile(r"value:([^:]*):([^:]*):([0-9]+):([0-9]+)")


class Place(NamedTuple):
    """The position of a value: the path of a file inside the directory, and a byte range of it."""

    path: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """A chunk and its uses: (destination of its elements, which elements)."""

    key: str
    value: bytes | Place
    metadata: zarr_arrays.Metadata
    wanted: list[tuple[np.ndarray, tuple[slice, ...]]]


@dataclasses.dataclass(frozen=True)
class DirectArray:
    """An array whose chunks can be read here.

    Attributes:
      prefix: prefix of its keys in the database.
      values: values of the whole database, by key.
    """

    directory: epath.Path
    prefix: str
    metadata: zarr_arrays.Metadata
    values: Mapping[str, bytes | Place]

    def place(self) -> Place:
        """Return the array's approximate position, to read neighbouring arrays together."""
        value = self.values.get(self.prefix + self.metadata.chunk_name((0,) * len(self.metadata.shape)))
        return value if isinstance(value, Place) else Place("", 0, 0)

    def pieces(self, parts: Mapping[Bounds, np.ndarray]) -> list[Piece]:
        """Return the chunks to read to fill the parts, each chunk once.

        Args:
          parts: {bounds: memory for the elements within them}.
        """
        pieces: dict[str, Piece] = {}
        chunks = self.metadata.chunks
        for bounds, part in parts.items():
            ranges = [range(b // n, -(-e // n)) for (b, e), n in zip(bounds, chunks, strict=True)]
            for index in itertools.product(*ranges):
                key = self.prefix + self.metadata.chunk_name(index)
                if key not in self.values:
                    raise DamagedCheckpoint(self.directory, f"the chunk {key} is missing")
                of_part, of_chunk = [], []
                for i, n, (begin, end) in zip(index, chunks, bounds, strict=True):
                    low, high = max(begin, i * n), min(end, (i + 1) * n)
                    of_part.append(slice(low - begin, high - begin))
                    of_chunk.append(slice(low - i * n, high - i * n))
                piece = pieces.setdefault(key, Piece(key, self.values[key], self.metadata, []))
                piece.wanted.append((part[(*of_part, ...)], tuple(of_chunk)))
        return list(pieces.values())


def open_arrays(directory: epath.Path, prefixes: Mapping[str, str]) -> dict[str, DirectArray]:
    """Return {name: array} for the arrays that can be read here; the others are left to TensorStore.

    Args:
      directory: directory of the database.
      prefixes: {array name: prefix of its keys in the database}.
    """
    try:
        values = locate(directory)
    except (AttributeError, KeyError, TypeError) as error:  # a TensorStore version with another output
        log.debug("where the chunks of %s lie is not understood: %r", directory, error)
        values = {}
    found = {}
    with _Files(directory) as files:
        for name, prefix in prefixes.items():
            value = values.get(prefix + zarr_arrays.METADATA_FILE)
            if isinstance(value, Place):
                content = np.empty(min(value.size, _MAX_METADATA_BYTES + 1), np.uint8)
                files.read_into(value._replace(size=content.size), content)
                value = content.tobytes()
            try:
                metadata = None if value is None else zarr_arrays.parse_metadata(value)
            except zarr_arrays.Malformed:
                continue
            if metadata is not None and metadata.codec is None and metadata.order == "C":
                found[name] = DirectArray(directory, prefix, metadata, values)
    if len(found) < len(prefixes):
        log.warning(
            "%d of the %d arrays of %s cannot be read straight from their files: TensorStore reads them, which takes "
            "several times as long", len(prefixes) - len(found), len(prefixes), directory,
        )  # fmt: skip
    return found


def read(directory: epath.Path, pieces: Iterable[Piece]) -> None:
    """Read the chunks into their destinations."""
    with _Files(directory) as files:
        for piece in pieces:
            size, dtype = piece.metadata.chunk_bytes, piece.metadata.dtype
            found = len(piece.value) if isinstance(piece.value, bytes) else piece.value.size
            if found != size:
                raise DamagedCheckpoint(directory, f"the chunk {piece.key} has {found} bytes instead of {size}")
            if isinstance(piece.value, bytes):
                chunk = np.frombuffer(piece.value, np.uint8)
            else:
                first = piece.wanted[0][0]
                if (
                    len(piece.wanted) == 1
                    and first.nbytes == size
                    and first.dtype == dtype
                    and first.flags.c_contiguous
                ):
                    files.read_into(piece.value, first.reshape(-1).view(np.uint8))
                    continue
                chunk = np.empty(size, np.uint8)
                files.read_into(piece.value, chunk)
            chunk = chunk.view(dtype).reshape(piece.metadata.chunks)
            for destination, elements in piece.wanted:
                destination[...] = chunk[elements]


def locate(directory: epath.Path) -> dict[str, bytes | Place]:
    """Return the values of an OCDBT database by key: small ones themselves, the positions of others.

    Values that TensorStore describes in an unknown way are skipped.

    Raises:
      ValueError: the database cannot be read, or two of its nodes have the same child: they could form a cycle, or
        expand to more keys than fit in memory.
    """
    base = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()
    newest = max(ts.ocdbt.dump(base).result()["versions"], key=lambda version: version["generation_number"])
    nodes = [("", newest["root"].get("location"))]
    values: dict[str, bytes | Place] = {}
    seen: set[str] = set()
    while nodes:
        prefix, location = nodes.pop()
        if location in seen:
            raise ValueError(f"its database has two nodes with the child {location}")
        seen.add(location)
        for entry in ts.ocdbt.dump(base, location).result()["entries"] if location else ():
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"].decode(), entry["location"]))
            elif isinstance(value := entry.get("inline_value"), bytes):
                values[prefix + entry["key"].decode()] = value
            elif match := _PLACE.fullmatch(entry.get("indirect_value", "")):
                place = Place(match[1] + match[2], int(match[3]), int(match[4]))
                values[prefix + entry["key"].decode()] = place
    return values


class _Files(contextlib.ExitStack):
    """Open files of a directory."""

    def __init__(self, directory: epath.Path):
        super().__init__()
        self._directory = directory
        self._opened: dict[str, tuple[int, int]] = {}  # descriptor and size

    def read_into(self, place: Place, memory: np.ndarray) -> None:
        """Fill `memory`, a uint8 array of the place's size."""
        try:
            if place.path not in self._opened:
                file = self.enter_context(open_inside(self._directory, place.path))
                self._opened[place.path] = file.fileno(), os.fstat(file.fileno()).st_size
            descriptor, size = self._opened[place.path]
            if place.offset + place.size > size:
                raise DamagedCheckpoint(self._directory, f"{place.path} ends too early")
            done = 0
            while done < place.size:
                count = os.preadv(descriptor, [memory[done:]], place.offset + done)
                if count == 0:
                    raise DamagedCheckpoint(self._directory, f"{place.path} ends too early")
                done += count
        except OSError as error:
            reason = f"{place.path} cannot be read: {error.strerror}"
            raise DamagedCheckpoint(self._directory, reason) from error
