"""T5X's Orbax checkpoints of any age, including ours (t5x.checkpoints.restore verifies those, and reads onto devices).

The arrays are in the directory itself, or in `state/`:

    _METADATA        JSON: the names, and how they are stored; until 2023, Orbax wrote a msgpack file instead or as well
    checkpoint       that msgpack file, whose leaves are small arrays or the string PLACEHOLDER://name
    manifest.ocdbt   the arrays are in an OCDBT database; without it, each is a zarr directory (target.a.b.kernel/)

Orbax has no checksums of its arrays: truncated or missing data is detected, a flipped bit not always.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.checkpoints.array_reader import EMPTY, METADATA
from t5x.checkpoints.formats import lazy_msgpack, native_t5x, zarr_arrays
from t5x.checkpoints.formats.safety import MAX_METADATA_BYTES, check_expansion, check_files
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.files.untrusted import open_inside, parse_json

MSGPACK = "checkpoint"
OCDBT = "manifest.ocdbt"

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")
_WRAPPERS = ("optimizer/", "_optimizer/")
_SECTIONS = tuple(f"{section}/" for section in native_t5x.SECTIONS)


def read_orbax(path: epath.PathLike) -> Source:
    """Open an Orbax checkpoint that has T5X's tree. Reads only metadata; `source.arrays[name].read()` reads an array.

    Args:
      path: the directory checkpoint_<step>, or the directory of its arrays.

    Raises:
      DamagedCheckpoint: it is incomplete, or points outside itself.
      UserError: it is not an Orbax checkpoint, or not one of a T5X training state.
    """
    directory = _state_directory(paths.local_path(path))
    file_bytes = check_files(directory)
    try:
        metadata = _read_metadata(directory)
        _check_finished(directory, metadata)
        if os.path.lexists(directory / MSGPACK):
            leaves = dict(_read_msgpack(directory))
        else:
            leaves = dict(_stored_names(directory, metadata))
    except OSError as error:
        raise DamagedCheckpoint(directory, f"its metadata cannot be read: {error.strerror}") from error
    ocdbt = os.path.lexists(directory / OCDBT)
    if metadata.get("use_ocdbt") and not ocdbt:
        raise DamagedCheckpoint(directory, f"{OCDBT} is missing")
    opened = zarr_arrays.open_arrays(
        directory,
        {name: leaf for name, leaf in leaves.items() if isinstance(leaf, str)},
        file_bytes=file_bytes,
        driver="zarr3" if metadata.get("use_zarr3") else "zarr",
        ocdbt=ocdbt,
        every_chunk=metadata.get("store_array_data_equal_to_fill_value") is True,
    )
    stored = {name: opened[name] if isinstance(leaf, str) else leaf for name, leaf in leaves.items()}
    check_expansion(directory, stored.values(), file_bytes)
    arrays = _with_t5x_names(directory, stored)
    kind = "OCDBT" if ocdbt else "zarr"
    step = native_t5x.read_step(directory, arrays.get("state/step"))
    return Source(f"T5X Orbax ({kind})", os.fspath(path), step, arrays)


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


def _read_metadata(directory: epath.Path) -> dict[str, Any]:
    if not os.path.lexists(directory / METADATA):
        return {}
    with open_inside(directory, METADATA) as file:
        content = file.read(MAX_METADATA_BYTES + 1)
    try:
        metadata = parse_json(content, max_bytes=MAX_METADATA_BYTES)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise DamagedCheckpoint(directory, f"{METADATA} is not a JSON object")
    return metadata


def _check_finished(directory: epath.Path, metadata: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if t5x wrote this checkpoint, but its manifest is missing."""
    custom = metadata.get("custom_metadata")
    checkpoint = directory.parent if directory.name == paths.STATE else directory
    if isinstance(custom, dict) and EMPTY in custom and not os.path.lexists(checkpoint / paths.MANIFEST):
        raise DamagedCheckpoint(checkpoint, f"{paths.MANIFEST} is missing, so it was not finished")


def _read_msgpack(directory: epath.Path) -> Iterator[tuple[str, str | LazyArray]]:
    """Yield (name of a parameter, the array or the name under which it is stored) from the msgpack file."""
    tree = lazy_msgpack.read_tree(directory, MSGPACK)
    if "version" in tree:
        raise UserError(f"{directory} is a native T5X checkpoint, not an Orbax one. Read it as such.")
    for name, leaf in lazy_msgpack.flatten(tree).items():
        if isinstance(leaf, str) and leaf.startswith(native_t5x.PLACEHOLDER):
            leaf = _check_inside(directory, leaf.removeprefix(native_t5x.PLACEHOLDER))
        elif not isinstance(leaf, LazyArray):
            raise DamagedCheckpoint(directory, f"{MSGPACK}: {name} is neither an array nor the name of one")
        yield name, leaf


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
            raise UserError(f"{directory}: {title[:200]} is a {str(kind)[:40]}; T5X's training state has only arrays.")
        if not keys or any(key == "" or "/" in key for key in keys):
            raise DamagedCheckpoint(directory, f"{METADATA} has keys of {title[:200]} that are not names")
        yield "/".join(keys), _check_inside(directory, ".".join(keys))


def _check_inside(directory: epath.Path, stored: str) -> str:
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
        content = f"the array {foreign[0][:200]}" if foreign else "no arrays"
        raise UserError(
            f"{directory} is an Orbax checkpoint, but not of a T5X training state: it has {content}; T5X's names start "
            f"with {', '.join(_SECTIONS)}."
        )
    return dict(arrays)
