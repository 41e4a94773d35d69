"""Finds the files of a checkpoint at a remote path, as formats.open_checkpoint does locally.

A listing is untrusted input: names that could escape their directory are refused.
"""

import dataclasses
import json
import logging
import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t5x.checkpoints import paths
from t5x.errors import UserError
from t5x.files import cache_directory, remote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

NATIVE = "checkpoint"
HUGGINGFACE = "config.json"
_ORBAX = ("_METADATA", "manifest.ocdbt")
_INDEX = ".index"
_MAX_STATE_FILE_BYTES = 2**20
_UNREAD = (".bin", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".ckpt")  # other formats of the same weights


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of one remote checkpoint.

    Attributes:
      url: readable URL of the checkpoint.
      directory: its directory in the file system.
      files: {path relative to `directory`: (size, version tag)}.
      wanted: the path to open, relative to `directory`: "" for the directory itself, a file, or a prefix.
    """

    url: str
    directory: str
    files: Mapping[str, tuple[int, str]]
    wanted: str = ""

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.wanted}" if self.wanted else self.directory

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.files.values())

    @property
    def place(self) -> str:
        """A short hash of the location."""
        return cache_directory.short_hash(self.url)

    @property
    def version(self) -> str:
        """A short hash of names, sizes and version tags. It changes if a file is added, removed or changed."""
        return cache_directory.short_hash(json.dumps([self.wanted, sorted(self.files.items())]))


def list_checkpoint(fs: "AbstractFileSystem", path: str, url: str) -> Listing:
    """List the checkpoint at a remote path: itself, the newest of a MODEL_DIR, a Mesh TensorFlow prefix, or a file."""
    with remote.explained(url):
        fs.invalidate_cache()
        if path.endswith(_INDEX):
            return _prefix(fs, path.removesuffix(_INDEX))
        try:
            kind = fs.info(path)["type"]
        except FileNotFoundError as error:
            if not remote.is_missing(error):
                raise
            return _prefix(fs, path)
        return _file(fs, path) if kind == "file" else _directory(fs, path)


def children(fs: "AbstractFileSystem", path: str) -> dict[str, dict[str, Any]]:
    """Return {name: info} of the direct children of a remote directory."""
    names = {info["name"].rstrip("/"): info for info in fs.ls(path, detail=True)}
    names.pop(path.rstrip("/"), None)  # object stores may list an empty object for the directory
    return {posixpath.basename(name): info for name, info in names.items()}


def is_checkpoint(names: Mapping[str, Any]) -> bool:
    """Return whether a directory with these entries is a checkpoint of a format that occupies one directory."""
    return any(name in names for name in (paths.MANIFEST, HUGGINGFACE, NATIVE, *_ORBAX))


def _directory(fs: "AbstractFileSystem", path: str) -> Listing:
    names = children(fs, path)
    if paths.MANIFEST in names or any(name in names for name in _ORBAX):
        return _tree(fs, path)
    if HUGGINGFACE in names:
        return _huggingface(fs, path, names)
    if paths.STATE in names and fs.exists(f"{path}/{paths.STATE}/_METADATA"):
        return _tree(fs, path)
    if steps := sorted(step for name in names if (step := paths.step_of(name)) is not None):
        return _directory(fs, f"{path}/{_newest(fs, path, steps)}")
    if prefixes := sorted(name.removesuffix(_INDEX) for name in names if name.endswith(_INDEX)):
        return _prefix(fs, f"{path}/{_latest_prefix(fs, path, names, prefixes)}")
    if NATIVE in names:
        return _tree(fs, path)
    some = ", ".join(sorted(names)[:8]) or "nothing"
    raise UserError(
        f"{fs.unstrip_protocol(path)} is no checkpoint that is known here, and no directory of checkpoint_<step>: it "
        f"holds {some}."
    )


def _newest(fs: "AbstractFileSystem", path: str, steps: list[int]) -> str:
    """Return the newest finished checkpoint of a MODEL_DIR; if none shows that it is finished, the newest."""
    unfinished = []
    for step in reversed(steps):
        name = paths.checkpoint_name(step)
        if is_checkpoint(children(fs, f"{path}/{name}")):
            break
        unfinished.append(name)
    else:
        name, unfinished = paths.checkpoint_name(steps[-1]), []
    url = fs.unstrip_protocol(path)
    for passed in unfinished:
        log.warning("Passing over %s/%s: it has no %s, so it was not finished", url, passed, paths.MANIFEST)
    log.info("%s: taking its newest checkpoint, %s", url, name)
    return name


def _tree(fs: "AbstractFileSystem", path: str, wanted: str = "") -> Listing:
    return _listing(fs, path, fs.find(path, detail=True), wanted)


def _huggingface(fs: "AbstractFileSystem", path: str, names: Mapping[str, dict[str, Any]]) -> Listing:
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(
            f"{fs.unstrip_protocol(path)} is a Hugging Face directory without safetensors; weights as a pickle are not "
            "read. Save the model again with transformers: save_pretrained(DIRECTORY, safe_serialization=True)."
        )
    return _listing(fs, path, {i["name"]: i for n, i in names.items() if not n.endswith(_UNREAD)})


def _file(fs: "AbstractFileSystem", path: str) -> Listing:
    """List a single file; the msgpack file of a native checkpoint includes the arrays beside it."""
    parent, name = posixpath.split(path)
    if name == NATIVE and not any(other.endswith(_INDEX) for other in children(fs, parent)):
        return _tree(fs, parent, name)
    return _listing(fs, parent, {path: fs.info(path)}, name)


def _prefix(fs: "AbstractFileSystem", path: str) -> Listing:
    """List `…/model.ckpt-1000000` of Mesh TensorFlow."""
    parent, name = posixpath.split(path)
    try:
        names = children(fs, parent)
    except FileNotFoundError:
        names = {}
    if name + _INDEX not in names:
        raise UserError(
            f"There is no checkpoint {fs.unstrip_protocol(path)}: no such file or directory. Check the path."
        )
    own = {i["name"]: i for n, i in names.items() if n == name + _INDEX or n.startswith(f"{name}.data-")}
    return _listing(fs, parent, own, name)


def _latest_prefix(fs: "AbstractFileSystem", path: str, names: Mapping[str, Any], prefixes: list[str]) -> str:
    from t5x.checkpoints.formats import mesh_tensorflow

    url = fs.unstrip_protocol(path)
    if NATIVE not in names:
        return mesh_tensorflow.newest(url, prefixes)
    end = min(names[NATIVE]["size"], _MAX_STATE_FILE_BYTES)
    content = fs.cat_file(f"{path}/{NATIVE}", start=0, end=end)
    name = mesh_tensorflow.latest_named(content, f"{url}/{NATIVE}")
    log.info("%s: taking %s, which the file %s names", url, name, NATIVE)
    return name


def _listing(
    fs: "AbstractFileSystem", directory: str, found: Mapping[str, dict[str, Any]], wanted: str = ""
) -> Listing:
    url = fs.unstrip_protocol(directory)
    files = {}
    for path, info in found.items():
        if info["type"] != "file" or path.endswith("/"):
            continue
        name = path.removeprefix(directory.rstrip("/") + "/")
        if name == path or not paths.is_plain_relative(name):
            raise UserError(f"{url} lists the name {name!r}, which is not a path inside it; it is not copied.")
        if not isinstance(info["size"], int):
            raise UserError(f"{url} does not tell the size of {name}; copy it here by other means and name the copy.")
        files[name] = (info["size"], cache_directory.version_tag(info))
    return Listing(f"{url}/{wanted}" if wanted else url, directory.rstrip("/"), files, wanted)
