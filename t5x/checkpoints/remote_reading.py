"""Copies of remote checkpoints: from `gs://`, `s3://` or any fsspec URL to the cache directory, and from the Hub.

CACHE/checkpoints/<source>-<version>/    see files/cache_directory.py
  source.txt                             the URL
  checkpoint_1000000/…                   the checkpoint under its own name

The files of a checkpoint are found as `formats.open_checkpoint` finds them locally. A listing is untrusted input: names
that could escape their directory are refused.
"""

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import names, paths
from t5x.files.cache_directory import CacheEntry
from t5x.files.disk_space import human_size
from t5x.files.remote import RemoteFile, RemotePath, as_local, download
from t5x.files.untrusted import is_plain_relative
from t5x.telemetry import copy_progress

log = logging.getLogger(__name__)

NATIVE = "checkpoint"
HUGGINGFACE = "config.json"
ORBAX = ("_METADATA", "manifest.ocdbt")
_INDEX = ".index"
_UNREAD = (".bin", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".ckpt")  # other formats of the same weights
# Weights are read from safetensors only. Pickle files, which can run code, are never downloaded.
_HUB_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
    "model-*-of-*.safetensors", "spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip


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


def stage(path: epath.PathLike) -> epath.Path:
    """Return the local path of a checkpoint by its name (see `names`): the path itself, or a copy of a remote one.

        stage("gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000")

    Args:
      path: a local path, which is returned as absolute path; or a remote checkpoint of any format, a prefix or file of
        one, or a MODEL_DIR, of which the newest finished checkpoint is used. A remote checkpoint is copied into the
        cache directory; the copy is reused as long as names, sizes and versions of the remote files stay the same.
        A model of the Hub is kept in the cache of `huggingface_hub`.
    """
    path = names.resolve(path)
    if names.is_hub_url(path):
        return _download_from_hub(path)
    if (local := as_local(path)) is not None:
        return paths.local_path(local)
    listing = list_checkpoint(RemotePath.parse(os.fspath(path)))
    entry = CacheEntry("checkpoints", listing.source, listing.version)
    name = listing.directory.name
    copy = epath.Path(entry.path) / (name if is_plain_relative(name) else NATIVE)
    is_complete = functools.partial(_is_complete, copy, listing)
    if not is_complete():
        entry.make(
            is_complete,
            lambda directory: _fill(os.path.join(directory, copy.name), listing),
            lambda: list_checkpoint(listing.path).version,
            resumable=True,
        )
    log.info("%s: reading the copy %s (to free the space: rm -r %s)", listing.source, copy / listing.target, entry.path)
    return copy / listing.target if listing.target else copy


def _fill(directory: str, listing: Listing) -> None:
    files = {os.path.join(directory, name): file for name, file in listing.files.items()}
    missing = {path: file for path, file in files.items() if _size(path) != file.size}
    size, present = sum(file.size for file in missing.values()), len(files) - len(missing)
    log.info(
        "%s: copying %d file(s), %s, to %s%s (T5X_CACHE_DIR chooses the place)",
        listing.source, len(missing), human_size(size), directory,
        f"; {present} are there from an earlier attempt" if present else "",
    )  # fmt: skip
    with copy_progress(size) as advance:
        download(missing, advance)
    with open(os.path.join(os.path.dirname(directory), "source.txt"), "w") as file:
        file.write(f"{listing.source}\n")


def _is_complete(copy: epath.Path, listing: Listing) -> bool:
    return copy.is_dir() and all(_size(copy / name) == file.size for name, file in listing.files.items())


def _size(path: epath.PathLike) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


# --- The Hub


def _download_from_hub(url: str) -> epath.Path:
    """Return the local directory of a model on the Hub, in the cache of `huggingface_hub`.

    Its environment variables apply: HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME (the cache), HF_HUB_OFFLINE. Without a
    network, the cached copy is used.
    """
    from huggingface_hub import constants, errors, snapshot_download

    model, revision = names.parse_hub_url(url)
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT  # may be set after huggingface_hub was imported
    # Its users may have meant a local path, which looks like a model id.
    not_local = "" if os.path.exists(model) else f"There is no local path {model}. "
    try:
        directory = snapshot_download(model, revision=revision, allow_patterns=list(_HUB_FILES), endpoint=endpoint)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated: accept its conditions at {endpoint}/{model}, then run `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{model} has no revision {revision!r}: pass a branch, a tag or a full commit hash.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            f"{not_local}There is no model {model} at {endpoint}, or it is private. For a private model, run "
            f"`hf auth login` or set HF_TOKEN.{names.suggestion(url)}"
        ) from error
    except (OSError, errors.HTTPError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk: errors of the network have none
            raise UserError(
                f"{model} could not be stored in {constants.HF_HUB_CACHE}: {error.strerror}. Set HF_HOME to a "
                "directory with enough space that you may write to."
            ) from error
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{not_local}The Hub's model {model} is not in the cache {constants.HF_HUB_CACHE} and could not be "
            f"downloaded from {endpoint} ({reason[0]}). Pass the path of a local checkpoint, check the network, or set "
            "HF_ENDPOINT to the URL of a mirror that you can reach."
        ) from error
    if not any(name.endswith(".safetensors") for name in os.listdir(directory)):
        raise UserError(
            f"{model} has no model.safetensors on the Hub. Its weights may be in pickle files, which are not read "
            f"because they can run code. Look for a safetensors conversion among the model's pull requests and pass "
            f"{model}@refs/pr/NUMBER, or, if you trust the model, save it again with transformers: "
            f"AutoModelForSeq2SeqLM.from_pretrained({model!r}).save_pretrained(DIRECTORY)."
        )
    log.info("%s: using the copy %s", url, directory)
    return epath.Path(directory)


# --- The files of a remote checkpoint


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
