"""Results on disk in chunks: after a kill at any moment, the next run resumes after the last finished chunk.

    tmp-<name>/job.json                            marks the directory as ours; what the results depend on
               .lock                               held by the process that writes
               <name>-chunk00000                   T5X's names
               <name>-chunk00000.COMPLETED         size and SHA-256 of the chunk, and what a later run needs to know

A chunk is finished once its `.COMPLETED` file exists, which is written after the chunk has been flushed to disk. Before
the merged output is renamed to its final name, its size and SHA-256 are written to job.json; an output that matches
them is complete.

A directory that is not empty and has no valid job.json is not ours: nothing is written to it or removed from it.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from t5x.errors import UserError
from t5x.files import atomic, locks
from t5x.files.digests import Digest, digest_of
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

COMPLETED = ".COMPLETED"
JOB_FILE = "job.json"
_LOCK_FILE = ".lock"
_FORMAT = "t5x inference chunks"


class Chunks:
    """The chunks of one output.

    Args:
      directory: directory of the chunks, created if necessary. Only its parent must exist.
      name: name of the output.
      job: what the results depend on, as JSON. Chunks of another job are refused.
      discard_others: discard chunks of another job instead, with a warning.
      restart_hint: how the user can start over, for the error message.

    Attributes:
      finished: records of the finished chunks, from the first on without a gap.
      merged: digest of the output if the chunks have been merged, else None.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        job: Mapping[str, Any],
        *,
        discard_others: bool = False,
        restart_hint: str = "remove it",
    ):
        self.directory = directory
        self.finished: list[dict[str, Any]] = []
        self.merged: Digest | None = None
        self._name = name
        self._job = json.loads(json.dumps(job))
        self._lock: int | None = None
        try:
            refuse_foreign(directory, name)
            atomic.make_directories(directory)
            self._acquire_lock()
            self._resume(discard_others, restart_hint)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise jsonl.write_error(directory, error) from error
            raise

    def path(self, index: int) -> str:
        """Return the path of chunk `index`."""
        return os.path.join(self.directory, f"{self._name}-chunk{index:05}")

    def write(self, write: Callable[[str], None], record: Mapping[str, Any]) -> None:
        """Write the next chunk.

        Args:
          write: writes the file at the path it is given, which does not exist. A user's own function may write
            elsewhere.
          record: what a later run needs to know about this chunk.
        """
        path = self.path(len(self.finished))
        try:
            _remove(path + COMPLETED, path)
            write(path)
            digest = {"size": None}
            if os.path.isfile(path):
                atomic.sync(path)
                digest = digest_of(path)
        except BaseException as error:
            _remove(path)
            if isinstance(error, OSError):
                raise jsonl.write_error(path, error) from error
            raise
        record = {**record, **digest}
        _write_json(path + COMPLETED, record)
        self.finished.append(record)

    def merge(self, path: str) -> None:
        """Merge the chunks into the file `path`, unless this has been done."""
        if self.merged is None:
            merge(path, [self.path(index) for index in range(len(self.finished))], self._write_job)

    def discard(self, first: int) -> None:
        """Discard chunk `first` and all after it."""
        if self.merged is not None:
            self._write_job(None)
        for index in range(first, len(self.finished)):
            _remove(self.path(index) + COMPLETED, self.path(index))
        del self.finished[first:]

    def remove(self) -> None:
        """Remove the directory and the files written to it. Other files are kept."""
        with contextlib.suppress(OSError), contextlib.closing(self):
            _remove(*self._chunk_files())
            if others := _names(self.directory) - {JOB_FILE, _LOCK_FILE}:
                log.warning("keeping %s: it contains files that t5x did not write (%s)", self.directory, min(others))
                return
            temporaries = [name for name in os.listdir(self.directory) if atomic.is_temporary(name)]
            for name in (*temporaries, _LOCK_FILE, JOB_FILE):
                _remove(os.path.join(self.directory, name))
            self.close()  # on NFS a directory with an open file cannot be removed
            os.rmdir(self.directory)

    def close(self) -> None:
        """Release the lock."""
        locks.release(self._lock)
        self._lock = None

    def claim(self, path: str, *, overwrite: bool) -> bool:
        """Return whether the file at `path` is the merged output of these chunks.

        This is the case if an earlier run was killed after the merge.

        Args:
          overwrite: start over instead of raising, also if some of the merged chunks have been removed.

        Raises:
          UserError: the file has changed since it was merged, and `overwrite` is False.
        """
        if self.merged is None:
            return False
        has_all_chunks = all(os.path.exists(self.path(index)) for index in range(len(self.finished)))
        exists = os.path.exists(path)
        if exists and digest_of(path) == self.merged and (has_all_chunks or not overwrite):
            return True
        if exists and not overwrite:
            raise changed_error(path, "Pass --overwrite to write it again, or move it away.")
        self._write_job(None)
        if not has_all_chunks:
            self._remove_chunks()
        return False

    def _acquire_lock(self) -> None:
        try:
            self._lock = locks.acquire(os.path.join(self.directory, _LOCK_FILE))
        except BlockingIOError as error:
            raise UserError(
                f"Another process is writing {self._name} (it holds the lock of {self.directory}). Wait for it, or "
                "choose another output."
            ) from error

    def _resume(self, discard_others: bool, restart_hint: str) -> None:
        content = read_json(os.path.join(self.directory, JOB_FILE)) or {}
        earlier = content.get("job")
        if earlier == self._job:
            self.merged = content.get("merged")
            self.finished = content["finished"] if self.merged else list(self._read_finished())
            return
        if earlier is not None and (content.get("merged") or self._chunk_files()):
            names = [name for name in sorted({*earlier, *self._job}) if earlier.get(name) != self._job.get(name)]
            differences = "; ".join(
                f"{name} was {_short(earlier.get(name))}, is {_short(self._job.get(name))}" for name in names
            )
            if not discard_others:
                raise UserError(
                    f"{self.directory} contains the results of a different run: {differences}. To resume that run, use "
                    f"its options; to start over, {restart_hint}."
                )
            log.warning("discarding the results of a different run in %s: %s", self.directory, differences)
        self._remove_chunks()
        self._write_job(None)

    def _write_job(self, merged: Digest | None) -> None:
        content = {"format": _FORMAT, "output": self._name, "job": self._job, "merged": merged}
        if merged is not None:
            content["finished"] = self.finished
        _write_json(os.path.join(self.directory, JOB_FILE), content)
        self.merged = merged

    def _remove_chunks(self) -> None:
        _remove(*self._chunk_files())
        self.finished = []

    def _chunk_files(self) -> list[str]:
        """Return the paths of the chunks and their files; a user's own writer may add a suffix."""
        ours = re.compile(re.escape(self._name) + r"-chunk\d{5,}(\..*)?")
        paths = (os.path.join(self.directory, name) for name in os.listdir(self.directory) if ours.fullmatch(name))
        return [path for path in paths if not _is_directory(path)]

    def _read_finished(self) -> Iterator[dict[str, Any]]:
        index = 0
        while (record := read_json(self.path(index) + COMPLETED)) is not None:
            if not is_intact(self.path(index), record):
                log.warning(
                    "%s has changed since it was written; computing it and the chunks after it again", self.path(index)
                )
                _remove(self.path(index) + COMPLETED)
                return
            yield record
            index += 1


def refuse_foreign(directory: str, name: str) -> None:
    """Raise a UserError if `directory` exists and is not ours for the chunks of `name`. Nothing is changed."""
    if not os.path.lexists(directory):
        return
    job = read_json(os.path.join(directory, JOB_FILE)) or {}
    ours = (job.get("format"), job.get("output")) == (_FORMAT, name)
    if not _is_directory(directory) or not (ours or _names(directory) <= {_LOCK_FILE}):
        raise UserError(
            f"{directory} exists, but is not a directory of chunks of {name}: it has no valid {JOB_FILE}. Nothing in "
            "it was changed. Move it away, or choose another output."
        )


def merge(path: str, chunks: Iterable[str], before_rename: Callable[[Digest], None] = lambda digest: None) -> None:
    """Concatenate the files `chunks` into one file. Those that have a `.COMPLETED` file are verified.

    Args:
      before_rename: called with the digest of the merged file before it gets its final name.
    """
    whole, size = hashlib.sha256(), 0
    try:
        with atomic.new_file(path) as file:
            for chunk in chunks:
                record, digest = read_json(chunk + COMPLETED) or {}, hashlib.sha256()
                with open(chunk, "rb") as source:
                    while piece := source.read(1 << 20):
                        size += file.write(piece)
                        digest.update(piece)
                        whole.update(piece)
                if record.get("sha256", digest.hexdigest()) != digest.hexdigest():
                    raise changed_error(chunk, "Run the same command again to recompute it and the chunks after it.")
            before_rename({"size": size, "sha256": whole.hexdigest()})
    except OSError as error:
        raise jsonl.write_error(path, error) from error


def is_intact(path: str, record: Mapping[str, Any]) -> bool:
    """Return whether a file still matches its record. A record without a size has no file."""
    if record.get("size") is None:
        return True
    return os.path.exists(path) and digest_of(path) == {name: record.get(name) for name in ("size", "sha256")}


def changed_error(path: str, fix: str) -> UserError:
    """Return the error for a file that was changed after it was finished."""
    return UserError(f"{path} has changed since it was written (its SHA-256 differs). {fix}")


def read_json(path: str) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing or damaged."""
    try:
        with open(path, "rb") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _write_json(path: str, content: Mapping[str, Any]) -> None:
    jsonl.replace(path, [json.dumps(content).encode() + b"\n"])


def _remove(*paths: str) -> None:
    """Remove existing files and links, but not directories."""
    for path in paths:
        if os.path.lexists(path) and not _is_directory(path):
            os.unlink(path)


def _names(directory: str) -> set[str]:
    """Return the names in a directory, without temporary files."""
    return {name for name in os.listdir(directory) if not atomic.is_temporary(name)}


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
