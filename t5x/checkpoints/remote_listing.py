"""Finds the files of a checkpoint at a remote path, as formats.open_checkpoint does locally.

A listing is untrusted input: names that could escape their directory are refused.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.files.remote import RemoteFile, RemotePath
from t5x.files.untrusted import is_plain_relative

log = logging.getLogger(__name__)

NATIVE = "checkpoint"
HUGGINGFACE = "config.json"
ORBAX = ("_METADATA", "manifest.ocdbt")
_INDEX = ".index"
_UNREAD = (".bin", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".ckpt")  # other formats of the same weights


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of one remote checkpoint.

    Attributes:
      directory: the directory of the files.
      files: {path relative to `directory`: file}.
      target: the path to open, relative to `directory`: "" for the directory itself, a file, or a prefix.
    """

    directory: RemotePath
    files: Mapping[str, RemoteFile]
    target: str = ""

    @property
    def path(self) -> RemotePath:
        return self.directory / self.target

    @property
    def source(self) -> str:
        """The URL in the driver's spelling, by which copies are found."""
        return self.path.fs.unstrip_protocol(self.path.path)

    @property
    def version(self) -> str:
        """Names, sizes and versions. It changes if a file is added, removed or changed."""
        return json.dumps([self.target, sorted((name, (file.size, file.version)) for name, file in self.files.items())])


def list_checkpoint(path: RemotePath) -> Listing:
    """List the checkpoint at a remote path: itself, the newest of a MODEL_DIR, a Mesh TensorFlow prefix, or a file."""
    path.fs.invalidate_cache()
    if path.name.endswith(_INDEX):
        return _prefix(path.parent, path.name.removesuffix(_INDEX))
    info = path.info()
    if info is None:
        return _prefix(path.parent, path.name)
    return _file(path, info) if info["type"] == "file" else _directory(path)


def is_checkpoint(names: Mapping[str, Any]) -> bool:
    """Return whether a directory with these entries is a checkpoint of a format that occupies one directory."""
    return any(name in names for name in paths.MARKERS)


def _directory(path: RemotePath) -> Listing:
    names = path.children()
    if paths.UNFINISHED in names and paths.MANIFEST not in names:
        raise UserError(
            f"{path.url} is unfinished: a run is writing or removing it, or was killed while it did. Use another "
            "checkpoint; the run's next start removes this one."
        )
    if paths.MANIFEST in names or any(name in names for name in ORBAX):
        return _listing(path, path.descendants())
    if HUGGINGFACE in names:
        return _huggingface(path, names)
    if paths.STATE in names and (path / paths.STATE / "_METADATA").info() is not None:
        return _listing(path, path.descendants())
    if steps := sorted(step for name in names if (step := paths.step_of(name)) is not None):
        return _directory(path / _newest(path, steps))
    if prefixes := sorted(name.removesuffix(_INDEX) for name in names if name.endswith(_INDEX)):
        return _prefix(path, _latest_prefix(path, names, prefixes))
    if NATIVE in names:
        return _listing(path, path.descendants())
    some = ", ".join(sorted(names)[:8]) or "nothing"
    raise UserError(
        f"{path.url} is neither a checkpoint of a supported format nor a directory of checkpoint_<step>: it contains "
        f"{some}. Check the path."
    )


def _newest(path: RemotePath, steps: list[int]) -> str:
    """Return the name of the newest checkpoint that is known to be complete, or else of the newest one."""
    unfinished = []
    for step in reversed(steps):
        name = paths.checkpoint_name(step)
        if is_checkpoint((path / name).children()):
            break
        unfinished.append(name)
    else:
        name, unfinished = paths.checkpoint_name(steps[-1]), []
    for skipped in unfinished:
        log.warning("Skipping %s/%s: it is unfinished, because it has no %s", path.url, skipped, paths.MANIFEST)
    log.info("%s: using its newest checkpoint, %s", path.url, name)
    return name


def _huggingface(path: RemotePath, names: Mapping[str, dict[str, Any]]) -> Listing:
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(
            f"{path.url} is a Hugging Face directory without safetensors; weights in pickle files are not read. Save "
            "the model again with transformers: save_pretrained(DIRECTORY, safe_serialization=True)."
        )
    return _listing(path, {name: info for name, info in names.items() if not name.endswith(_UNREAD)})


def _file(path: RemotePath, info: dict[str, Any]) -> Listing:
    """List a single file; the msgpack file of a native checkpoint includes the arrays beside it."""
    if path.name == NATIVE and not any(other.endswith(_INDEX) for other in path.parent.children()):
        return _listing(path.parent, path.parent.descendants(), path.name)
    return _listing(path.parent, {path.name: info}, path.name)


def _prefix(directory: RemotePath, name: str) -> Listing:
    """List `…/model.ckpt-1000000` of Mesh TensorFlow."""
    names = directory.children()
    if name + _INDEX not in names:
        raise UserError(f"There is no checkpoint {(directory / name).url}: no such file or directory. Check the path.")
    own = {n: info for n, info in names.items() if n == name + _INDEX or n.startswith(f"{name}.data-")}
    return _listing(directory, own, name)


def _latest_prefix(path: RemotePath, names: Mapping[str, Any], prefixes: list[str]) -> str:
    from t5x.checkpoints.formats import mesh_tensorflow

    if NATIVE not in names:
        return mesh_tensorflow.newest(path.url, prefixes)
    state = (path / NATIVE).file(names[NATIVE])
    content = state.read(0, min(state.size, mesh_tensorflow.MAX_STATE_FILE_BYTES))
    name = mesh_tensorflow.latest_named(content, state.path.url)
    log.info("%s: using %s, which the file %s names", path.url, name, NATIVE)
    return name


def _listing(directory: RemotePath, entries: Mapping[str, dict[str, Any]], target: str = "") -> Listing:
    files = {}
    for name, info in entries.items():
        if info["type"] != "file" or name.endswith("/"):
            continue
        if not is_plain_relative(name):
            raise UserError(f"{directory.url} lists {name!r}, which is not a path inside it. Nothing is copied.")
        files[name] = (directory / name).file(info)
    return Listing(directory, files, target)
