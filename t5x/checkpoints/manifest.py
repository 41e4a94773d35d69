"""MANIFEST.json: size and hash of every file of a checkpoint, because Orbax does not checksum array data.

The manifest is written last, so a checkpoint without one is incomplete. It is untrusted input: the paths in it are
compared with the contents of the directory, and nothing else is opened.

On a disk the hash is a SHA-256. Object stores compute an MD5 of every file: that one is recorded, and compared with the
one in a listing, so that a remote checkpoint is saved and verified without downloading it.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.checkpoints.paths import open_files
from t5x.files.local import FileEntry
from t5x.files.untrusted import parse_json

FORMAT = "t5x"
VERSION = 1
_MAX_BYTES = 16 * 2**20
_MAX_LISTED = 5  # damaged files in a message
_BLOCK_BYTES = 2**20
_HASHES = re.compile("[0-9a-f]{64}/|/[0-9a-f]{32}")


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete or changed. `reason` names the file of `path` and what is wrong with it."""

    def __init__(self, path: epath.PathLike, reason: str):
        super().__init__(f"{os.fspath(path)} is damaged: {reason}. Use another checkpoint, or fetch this one again.")
        self.path = path
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """What is known about a file: its size, and one of the hashes."""

    size: int
    sha256: str = ""
    md5: str = ""

    @property
    def algorithm(self) -> str:
        return "sha256" if self.sha256 else "md5"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json: the step, and a record for each file by its relative path."""

    step: int
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        files = {
            name: {field: value for field, value in dataclasses.asdict(record).items() if value != ""}
            for name, record in sorted(self.files.items())
        }
        content = {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def write(directory: epath.PathLike, step: int) -> None:
    """Write the manifest of a directory. On a disk, it is durable only after `atomic.sync_tree`."""
    open_files(directory).create(paths.MANIFEST, describe(directory, step).to_bytes())


def describe(directory: epath.PathLike, step: int, hashed: Mapping[str, FileRecord] | None = None) -> Manifest:
    """Hash everything in `directory`, a few files at a time, and return its manifest.

    Args:
      hashed: records of files that have been hashed already. The files must exist with the same size.
    """
    hashed, listed = hashed or {}, open_files(directory).list()
    entries = {name: entry for name, entry in listed.items() if name not in (paths.PINNED, paths.UNFINISHED)}
    for name, record in hashed.items():
        if name not in entries or entries[name].size != record.size:
            size = f"has {entries[name].size} bytes instead of {record.size}" if name in entries else "is missing"
            raise OSError(errno.ENOENT, f"{name} {size}", os.fspath(directory))
    others = {name: entry for name, entry in entries.items() if name not in hashed}
    return Manifest(step, {**hash_files(directory, others), **hashed})


def read(directory: epath.PathLike) -> Manifest:
    """Read and check the manifest itself, not the files that it lists."""
    files = open_files(directory)
    if not files.exists():
        raise UserError(f"There is no checkpoint at {os.fspath(directory)}. Check the path.")

    def damaged(reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(directory, f"{paths.MANIFEST} {reason}")

    try:
        with files.open(paths.MANIFEST) as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise damaged("is missing, so it was not finished or was not written by this program") from None
    except OSError as error:
        raise damaged(f"cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise damaged(f"is larger than {paths.human_size(_MAX_BYTES)}")
    try:
        return _parse(content)
    except ValueError as error:
        raise damaged(str(error)) from error


def is_of_step(directory: epath.PathLike, step: int) -> bool:
    """Return whether a directory has a valid manifest of that step."""
    try:
        return read(directory).step == step
    except UserError:
        return False


def verify(directory: epath.PathLike) -> None:
    """Verify every file; raise DamagedCheckpoint, naming the bad ones, unless the checkpoint is complete.

    Files that the manifest does not list are tolerated (PINNED, your own notes), except in `state/`.
    """
    Verification(directory).finish()


class Verification:
    """`verify`, started in the background. `finish` waits for it and raises what it found.

    The checkpoint may be read meanwhile, but nothing of it may be used before `finish` has returned. Problems that show
    without reading the files (one is missing, too short, a pipe) are raised by the constructor.
    """

    def __init__(self, directory: epath.PathLike):
        self._directory = os.fspath(directory)
        self._manifest = read(self._directory)
        named_step = paths.step_of(self._directory)
        if named_step is not None and named_step != self._manifest.step:
            raise self._damaged(paths.renamed(self._manifest.step))
        self._problems, self._to_hash = self._check_sizes()
        pool = ThreadPoolExecutor(1, thread_name_prefix="t5x-verify")
        algorithms = {name: self._manifest.files[name].algorithm for name in self._to_hash}
        self._hashes = pool.submit(_read_and_hash, self._directory, algorithms)
        pool.shutdown(wait=False)
        if self._problems:
            self.finish()

    def finish(self) -> None:
        """Wait for the result; raise DamagedCheckpoint unless the checkpoint is complete."""
        try:
            hashes = self._hashes.result()
        except OSError as error:
            raise self._damaged(f"{error.filename} cannot be read: {error.strerror}") from error
        changed = [name for name in self._to_hash if hashes[name] != self._manifest.files[name]]
        problems = self._problems + [f"{name} has changed" for name in changed]
        if problems:
            more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
            raise self._damaged("; ".join(problems[:_MAX_LISTED]) + more)

    def _check_sizes(self) -> tuple[list[str], dict[str, FileEntry]]:
        """Return (problems that show without reading the files, the files to be read)."""
        try:
            present = open_files(self._directory).list()
        except OSError as error:
            raise self._damaged(f"it cannot be listed: {error.strerror}") from error
        problems, to_hash = [], {}
        for name, record in self._manifest.files.items():
            entry = present.get(name)
            if entry is None:
                problems.append(f"{name} is missing")
            elif not entry.is_regular:
                problems.append(f"{name} is not a regular file")
            elif entry.size != record.size:
                problems.append(f"{name} has {entry.size} bytes instead of {record.size}")
            elif record.sha256 or record.md5 != entry.md5:
                to_hash[name] = entry
        extra = [name for name in present if name.startswith(paths.STATE + "/") and name not in self._manifest.files]
        return problems + [f"{name} does not belong there" for name in extra], to_hash

    def _damaged(self, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self._directory, reason)


def read_file(directory: epath.PathLike, name: str) -> bytes:
    """Return the content of one file of the checkpoint, checked against the manifest."""
    manifest = read(directory)
    record = manifest.files.get(name)
    if record is None:
        others = ", ".join(other for other in manifest.files if not other.startswith(paths.STATE + "/")) or "none"
        raise UserError(f"{directory} has no file {name!r}. Files beside the arrays: {others}.")
    try:
        with open_files(directory).open(name) as file:
            content = _read(file, record.size)
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read: {error.strerror}") from error
    digest = hashlib.new(record.algorithm, content).hexdigest()
    if FileRecord(len(content), **{record.algorithm: digest}) != record:
        raise DamagedCheckpoint(directory, f"{name} has changed")
    return content


def hash_files(
    directory: epath.PathLike, entries: Mapping[str, FileEntry], *, flush: bool = False
) -> dict[str, FileRecord]:
    """Return the records of files.

    Args:
      entries: the files, as listed before.
      flush: also flush each file to disk.
    """
    known = {}
    if open_files(directory).reports_md5(paths.UNFINISHED):  # the ETags of files that S3 encrypts are something else
        known = {name: FileRecord(entry.size, md5=entry.md5) for name, entry in entries.items() if entry.md5}
    others = dict.fromkeys((name for name in entries if name not in known), "sha256")
    return known | _read_and_hash(directory, others, flush=flush)


def _read_and_hash(
    directory: epath.PathLike, algorithms: Mapping[str, str], *, flush: bool = False
) -> dict[str, FileRecord]:
    """Return the records of files, each with its own hash algorithm.

    hashlib releases the interpreter lock, so threads hash in parallel.
    """
    files = open_files(directory)

    def record(name: str) -> FileRecord:
        try:
            size, digest = files.hash(name, algorithms[name], flush=flush)
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from error
        return FileRecord(size, **{algorithms[name]: digest})

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="t5x-hash") as pool:
        return dict(zip(algorithms, pool.map(record, algorithms), strict=True))


def _read(file: BinaryIO, size: int) -> bytes:
    """Return the content of a file, and at most one block more than `size` bytes, which need not be the file's size."""
    blocks, count = [], 0
    while count <= size and (block := file.read(_BLOCK_BYTES)):
        blocks.append(block)
        count += len(block)
    return b"".join(blocks)


def _parse(content: bytes) -> Manifest:
    """Return the manifest in `content`; raise ValueError unless `Manifest.to_bytes` has written it."""
    try:
        data = parse_json(content, max_bytes=_MAX_BYTES)
    except ValueError as error:
        raise ValueError("is not JSON") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'does not say "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ValueError(f"has version {data.get('version')!r}; this program reads version {VERSION}")
    try:
        files = {name: FileRecord(**record) for name, record in data["files"].items()}
        manifest = Manifest(data["step"], files)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("does not have the fields step and files, with size and hash of each file") from error
    for name in files:
        if not paths.is_plain_relative(name):
            raise ValueError(f"names {name!r}, which is not a path inside the checkpoint")
    if not all(type(n) is int and n >= 0 for n in (manifest.step, *(record.size for record in files.values()))):
        raise ValueError("has an invalid step or size")
    if not all(_HASHES.fullmatch(f"{record.sha256}/{record.md5}") for record in files.values()):
        raise ValueError("has an invalid hash")
    if manifest.to_bytes() != content:
        raise ValueError("has changed since it was written")
    return manifest
