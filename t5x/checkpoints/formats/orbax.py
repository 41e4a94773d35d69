"""T5X's Orbax checkpoints of any age, including ours (t5x.checkpoints.restore verifies those, and reads onto devices).

The arrays are in the directory itself, or in `state/`:

    _METADATA        JSON: the names, and how they are stored; until 2023, Orbax wrote a msgpack file instead or as well
    checkpoint       that msgpack file, whose leaves are small arrays or the string PLACEHOLDER://name
    manifest.ocdbt   the arrays are in an OCDBT database; without it, each is a zarr directory (target.a.b.kernel/)

Orbax has no checksums of its arrays: truncated or missing data is detected, a flipped bit not always.
"""

import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from t5x.checkpoints import paths
from t5x.checkpoints.array_reader import EMPTY
from t5x.checkpoints.formats import lazy_msgpack, native_t5x, zarr_arrays
from t5x.checkpoints.formats.safety import DTYPES, check_chunk_shape, check_expansion, check_shape
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError
from t5x.files.system_errors import first_line
from t5x.files.untrusted import open_inside, parse_json

METADATA = "_METADATA"
MSGPACK = "checkpoint"
OCDBT = "manifest.ocdbt"

_MAX_METADATA_BYTES = 32 * 2**20
_MAX_CHUNKS = 100_000  # in total, more if the files are large: TensorStore is slow even for missing ones
_BYTES_PER_CHUNK = 1000
_READ_WHOLE = (METADATA, OCDBT, ".zarray", "zarr.json")  # by TensorStore, which aborts the process if memory runs out
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")
_WRAPPERS = ("optimizer/", "_optimizer/")
_SECTIONS = ("target/", "state/", "flax_mutables/")


def read_orbax(path: epath.PathLike) -> Source:
    """Open an Orbax checkpoint that has T5X's tree. Reads only metadata; `source.arrays[name].read()` reads an array.

    Args:
      path: the directory checkpoint_<step>, or the directory of its arrays.

    Raises:
      DamagedCheckpoint: it is incomplete, or points outside itself.
      UserError: it is not an Orbax checkpoint, or not one of a T5X training state.
    """
    directory = _state_directory(paths.local_path(path))
    size = _check_files(directory)
    try:
        metadata = _read_metadata(directory)
        _check_ours(directory, metadata)
        if os.path.lexists(directory / MSGPACK):
            leaves = dict(_placeholders(directory, "", _read_msgpack(directory)))
        else:
            leaves = dict(_stored_names(directory, metadata))
    except OSError as error:
        raise DamagedCheckpoint(directory, f"its metadata cannot be read: {error.strerror}") from error
    ocdbt = os.path.lexists(directory / OCDBT)
    if metadata.get("use_ocdbt") and not ocdbt:
        raise DamagedCheckpoint(directory, f"{OCDBT} is missing")
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, LazyArray)}
    stored = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, LazyArray)}
    if ocdbt or metadata.get("use_zarr3"):
        arrays |= _open_arrays(directory, stored, metadata, ocdbt, size)
    else:
        arrays |= {name: zarr_arrays.open_array(directory, leaf) for name, leaf in stored.items()}
    check_expansion(directory, arrays.values(), size)
    arrays = _with_t5x_names(directory, {name: arrays[name] for name in leaves})
    kind = "OCDBT" if ocdbt else "zarr"
    return Source(f"T5X Orbax ({kind})", os.fspath(path), native_t5x.training_step(directory, arrays), arrays)


def _state_directory(path: epath.Path) -> epath.Path:
    if not path.is_dir():
        raise UserError(f"There is no checkpoint directory at {path}. Check the path.")
    if ".orbax-checkpoint-tmp" in path.name:
        raise UserError(f"{path} was never finished by its writer. Use another checkpoint.")
    for directory in (path, path / paths.STATE):
        if any(os.path.lexists(directory / name) for name in (METADATA, MSGPACK)):
            if directory != path and os.path.islink(directory):
                raise DamagedCheckpoint(path, f"{paths.STATE} is a symbolic link")
            return directory
    raise UserError(
        f"{path} is not an Orbax checkpoint of T5X: neither it nor its {paths.STATE}/ has a file {METADATA} or "
        f"{MSGPACK}. Check the path."
    )


def _check_files(directory: epath.Path) -> int:
    """Return the bytes of all files; refuse links and the like, which the array libraries would follow anywhere."""
    size = 0
    for name, status in paths.walk(directory):
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpoint(directory, f"{name} is not a regular file")
        if os.path.basename(name) in _READ_WHOLE and status.st_size > _MAX_METADATA_BYTES:
            raise DamagedCheckpoint(directory, f"{name} has {status.st_size} bytes, too many for metadata")
        size += status.st_size
    return size


def _read_metadata(directory: epath.Path) -> dict[str, Any]:
    if not os.path.lexists(directory / METADATA):
        return {}
    with open_inside(directory, METADATA) as file:
        content = file.read(_MAX_METADATA_BYTES + 1)
    try:
        metadata = parse_json(content, max_bytes=_MAX_METADATA_BYTES)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise DamagedCheckpoint(directory, f"{METADATA} is not a JSON object")
    return metadata


def _check_ours(directory: epath.Path, metadata: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if this is one of ours without its manifest: it is unfinished, or has lost it."""
    custom = metadata.get("custom_metadata")
    checkpoint = directory.parent if directory.name == paths.STATE else directory
    if isinstance(custom, dict) and EMPTY in custom and not os.path.lexists(checkpoint / paths.MANIFEST):
        raise DamagedCheckpoint(checkpoint, f"{paths.MANIFEST} is missing, so it was not finished")


def _read_msgpack(directory: epath.Path) -> dict[str, Any]:
    tree = lazy_msgpack.read_tree(directory, MSGPACK)
    if "version" in tree:
        raise UserError(f"{directory} is a native T5X checkpoint, not an Orbax one. Read it as such.")
    return tree


def _stored_names(directory: epath.Path, metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name of a parameter, name under which it is stored) from _METADATA."""
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict):
        raise DamagedCheckpoint(directory, f"{METADATA} has no tree_metadata")
    for title, entry in entries.items():
        try:
            keys = [str(key["key"]) for key in entry["key_metadata"]]
            kind, empty = entry["value_metadata"]["value_type"], entry["value_metadata"].get("skip_deserialize", False)
        except (TypeError, KeyError, AttributeError):
            raise DamagedCheckpoint(directory, f"{METADATA} does not describe {title[:200]}") from None
        if empty or kind in _EMPTY:
            continue
        if kind not in _ARRAYS:
            raise UserError(f"{directory}: {title[:200]} is a {str(kind)[:40]}; the state of T5X has arrays only.")
        if not keys or any(key == "" or "/" in key for key in keys):
            raise DamagedCheckpoint(directory, f"{METADATA} has keys of {title[:200]} that are not names")
        yield "/".join(keys), _inside(directory, ".".join(keys))


def _placeholders(directory: epath.Path, name: str, node: Any) -> Iterator[tuple[str, str | LazyArray]]:
    """Yield (name of a parameter, the array or the name under which it is stored) from the msgpack file."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _placeholders(directory, f"{name}/{key}" if name else key, child)
    elif isinstance(node, LazyArray):
        yield name, node
    elif isinstance(node, str) and node.startswith(native_t5x.PLACEHOLDER):
        yield name, _inside(directory, node.removeprefix(native_t5x.PLACEHOLDER))
    elif isinstance(node, int | float):
        yield name, native_t5x.number(node)
    elif node is not None:
        raise DamagedCheckpoint(directory, f"{MSGPACK}: {name} is neither an array nor the name of one")


def _inside(directory: epath.Path, stored: str) -> str:
    if not paths.is_plain_relative(stored):
        raise DamagedCheckpoint(directory, f"it names the array {stored[:200]!r}, which is not a path inside it")
    return stored


def _with_t5x_names(directory: epath.Path, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return `arrays` without the outer level `optimizer` of early checkpoints."""
    for wrapper in _WRAPPERS:
        if arrays and all(name.startswith(wrapper) for name in arrays):
            arrays = {name.removeprefix(wrapper): array for name, array in arrays.items()}
    foreign = [name for name in arrays if not name.startswith(_SECTIONS)]
    if foreign or not arrays:
        found = f"the array {foreign[0][:200]}" if foreign else "no arrays"
        raise UserError(
            f"{directory} is an Orbax checkpoint, but not of a T5X training state: it has {found}; T5X's names start "
            f"with {', '.join(_SECTIONS)}."
        )
    return dict(arrays)


# --- Arrays through TensorStore


def _open_arrays(
    directory: epath.Path, stored: Mapping[str, str], metadata: Mapping[str, Any], ocdbt: bool, size: int
) -> dict[str, LazyArray]:
    file = {"driver": "file", "path": f"{directory}/"}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    every_chunk = metadata.get("store_array_data_equal_to_fill_value") is True
    context = tensorstore.Context()

    def start(stored_name: str) -> tensorstore.Future:
        if ocdbt:
            kvstore = {"driver": "ocdbt", "base": file, "path": stored_name + "/"}
        else:
            kvstore = {**file, "path": f"{directory}/{stored_name}/"}
        return tensorstore.open({"driver": driver, "kvstore": kvstore}, read=True, open=True, context=context)

    opening = {name: start(stored_name) for name, stored_name in stored.items()}
    arrays, chunks = {}, 0
    for name, future in opening.items():
        array = _call(directory, name, future.result)
        if array.dtype.name not in DTYPES:
            raise DamagedCheckpoint(
                directory, f"{name} has the dtype {array.dtype.name}; known: {', '.join(DTYPES)}"
            )
        dtype = DTYPES[array.dtype.name]
        try:
            shape = check_shape(list(array.shape))
            check_chunk_shape(shape, array.chunk_layout.write_chunk.shape or (), dtype.itemsize)
        except ValueError as error:
            raise DamagedCheckpoint(directory, f"of {name}, {error}") from None
        if not ocdbt:
            _check_chunk_files(directory, stored[name], array)
        chunks += _count_chunks(array)
        if chunks > _MAX_CHUNKS + size // _BYTES_PER_CHUNK:
            raise DamagedCheckpoint(directory, f"with {name} it claims {chunks} chunks, which its files cannot hold")
        arrays[name] = LazyArray(shape, dtype, _reader(directory, name, array, every_chunk))
    return arrays


def _reader(
    directory: epath.Path, name: str, array: tensorstore.TensorStore, every_chunk: bool
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        if every_chunk or array.fill_value is None:
            _check_chunks(directory, name, array)
        return _call(directory, name, lambda: array.read().result())

    return read


def _check_chunks(directory: epath.Path, name: str, array: tensorstore.TensorStore) -> None:
    """Raise DamagedCheckpoint if chunks are missing, which TensorStore would read as zeros."""
    keys = _call(directory, name, lambda: array.kvstore.list().result())
    there = sum(1 for key in keys if os.path.basename(key) not in (b".zarray", b"zarr.json"))
    if there != (expected := _count_chunks(array)):
        raise DamagedCheckpoint(directory, f"{name} has {there} chunks instead of {expected}")


def _check_chunk_files(directory: epath.Path, stored_name: str, array: tensorstore.TensorStore) -> None:
    """Check file sizes: TensorStore reads whole chunk files. A shard's index may be larger than the shard itself."""
    most = 8 * math.prod(array.chunk_layout.write_chunk.shape or ()) * array.dtype.numpy_dtype.itemsize + 2**20
    for name, status in paths.walk(directory / stored_name):
        if status.st_size > most:
            raise DamagedCheckpoint(directory, f"{stored_name}/{name} has {status.st_size} bytes, too many for a chunk")


def _count_chunks(array: tensorstore.TensorStore) -> int:
    chunk = array.chunk_layout.write_chunk.shape or ()  # None for zero-dimensional arrays
    return math.prod(-(-size // side) for size, side in zip(array.shape, chunk, strict=True))


def _call(directory: epath.Path, name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ValueError, RuntimeError, NotImplementedError, OSError, MemoryError) as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read: {first_line(error)}") from error
