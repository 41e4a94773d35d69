"""The output of a job: chunks that become one file, on disk or remote, or standard output.

After a kill at any moment, the next run resumes after the last finished chunk.

    tmp-<name>/job.json                            marks a directory of t5x; what the results depend on
               .lock                               held by the process that writes; see files/directory.py
               <name>-chunk00000                   T5X's names
               <name>-chunk00000.COMPLETED         size and SHA-256 of the chunk, and what a later run needs to know

A chunk is finished once its `.COMPLETED` file exists, which is written after the chunk has been flushed to disk, or
uploaded. Before the merged output gets its final name, its size and SHA-256 are written to job.json; an output that
matches them is complete.

A directory that is not empty and has no valid job.json was not created by t5x: nothing in it is written or removed.
"""

import abc
import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from t5x._runtime.errors import UserError, located, shorten
from t5x.files.digests import Digest, digest_of
from t5x.files.directory import Directory, open_directory, split
from t5x.files.local import LOCK_FILE
from t5x.files.remote import is_remote
from t5x.partitioning import distributed
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

COMPLETED = ".COMPLETED"
JOB_FILE = "job.json"
_FORMAT = "t5x inference chunks"
_THREADS = 8  # that verify chunks
_MERGED_AT_ONCE = 1000  # chunks; remote ones are copied to the local disk


class Chunks:
    """The chunks of one output.

    Args:
      directory: local or remote directory of the chunks, created if necessary.
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
        self._files = open_directory(directory)
        self._lock = contextlib.ExitStack()
        try:
            refuse_foreign(self._files, name)
            self._files.make()
            self._acquire_lock()
            self._resume(discard_others, restart_hint)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise jsonl.write_error(directory, error) from error
            raise

    def path(self, index: int) -> str:
        """Return the path of chunk `index`."""
        return self._files.path(self._chunk(index))

    def write(self, write: Callable[[str], None], record: Mapping[str, Any]) -> None:
        """Write the next chunk.

        Args:
          write: writes the file at the local path it is given, which does not exist. A user's own function may write
            elsewhere.
          record: what a later run needs to know about this chunk.
        """
        name = self._chunk(len(self.finished))
        try:
            with self._files.writing(name) as path:
                write(path)
                digest = digest_of(path) if os.path.isfile(path) else {"size": None}
        except OSError as error:
            raise jsonl.write_error(self._files.path(name), error) from error
        record = {**record, **digest}
        self._check_lock()
        self._write_json(name + COMPLETED, record)
        self.finished.append(record)

    def merge(self, path: str) -> None:
        """Merge the chunks into the file `path`, unless this has been done."""
        if self.merged is None:
            self._check_lock()
            merge(path, self._files, [self._chunk(index) for index in range(len(self.finished))], self._write_job)

    def discard(self, first: int) -> None:
        """Discard chunk `first` and all after it."""
        if self.merged is not None:
            self._write_job(None)
        names = [self._chunk(index) for index in range(first, len(self.finished))]
        self._files.remove(*(name + COMPLETED for name in names))
        self._files.remove(*names)
        del self.finished[first:]

    def remove(self) -> None:
        """Remove the directory and the files written to it. Other files are kept."""
        with contextlib.closing(self):
            try:
                self._files.remove(*self._chunk_files())
                if others := self._files.names() - {JOB_FILE, LOCK_FILE}:
                    log.warning("keeping %s: it contains files that t5x did not write (%s)", self._files, min(others))
                    return
                self._files.remove(JOB_FILE)
                self.close()  # on NFS a directory with an open file cannot be removed
                self._files.remove_itself()
            except (OSError, UserError) as error:
                log.warning("the chunks in %s could not be removed: %s", self._files, error)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

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
        has_all_chunks = {self._chunk(index) for index in range(len(self.finished))} <= self._files.names()
        parent, name = split(path)
        exists = parent.exists(name)
        if exists and parent.is_intact(name, self.merged) and (has_all_chunks or not overwrite):
            return True
        if exists and not overwrite:
            raise changed_error(path, "Pass --overwrite to write it again, or move it away.")
        self._write_job(None)
        if not has_all_chunks:
            self._remove_chunks()
        return False

    def _chunk(self, index: int) -> str:
        return f"{self._name}-chunk{index:05}"

    def _acquire_lock(self) -> None:
        try:
            self._check_lock = self._lock.enter_context(self._files.locked())
        except BlockingIOError as error:
            raise UserError(
                f"Another process is writing {self._name} (it holds the lock of {self.directory}). Wait for it, or "
                "choose another output."
            ) from error

    def _resume(self, discard_others: bool, restart_hint: str) -> None:
        content = read_json(self._files, JOB_FILE) or {}
        earlier = content.get("job")
        if earlier == self._job:
            self.merged = content.get("merged")
            self.finished = content["finished"] if self.merged else self._read_finished()
            return
        if earlier is not None and (content.get("merged") or self._chunk_files()):
            names = [name for name in sorted({*earlier, *self._job}) if earlier.get(name) != self._job.get(name)]
            differences = "; ".join(
                f"{name} was {shorten(earlier.get(name), 60)}, is {shorten(self._job.get(name), 60)}" for name in names
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
        self._write_json(JOB_FILE, content)
        self.merged = merged

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        jsonl.replace(self._files.path(name), [json.dumps(content).encode() + b"\n"])

    def _remove_chunks(self) -> None:
        self._files.remove(*self._chunk_files())
        self.finished = []

    def _chunk_files(self) -> list[str]:
        """Return the names of the chunks and their files; a user's own writer may add a suffix."""
        pattern = re.compile(re.escape(self._name) + r"-chunk\d{5,}(\..*)?")
        return [name for name in self._files.names() if pattern.fullmatch(name)]

    def _read_finished(self) -> list[dict[str, Any]]:
        """Return the records of the finished chunks that are intact; remove everything after them."""
        files = self._chunk_files()
        chunks = list(itertools.takewhile(lambda name: name + COMPLETED in files, map(self._chunk, itertools.count())))
        finished: list[dict[str, Any]] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, record in zip(chunks, pool.map(self._read_record, chunks), strict=True):
                if record is None:
                    log.warning(
                        "%s has changed since it was written; computing it and the chunks after it again",
                        self._files.path(name),
                    )
                    break
                finished.append(record)
        intact = tuple(f"{name}." for name in chunks[: len(finished)])
        self._files.remove(*(name for name in files if not f"{name}.".startswith(intact)))
        return finished

    def _read_record(self, name: str) -> dict[str, Any] | None:
        record = read_json(self._files, name + COMPLETED)
        return record if record is not None and is_intact(self._files, name, record) else None


def refuse_foreign(directory: Directory, name: str) -> None:
    """Raise a UserError if `directory` exists, but not for the chunks of `name`. Nothing is changed."""
    is_link = os.path.islink(str(directory))
    job = read_json(directory, JOB_FILE) or {}
    if (job.get("format"), job.get("output")) == (_FORMAT, name) and not is_link:
        return
    try:
        is_empty = directory.names() <= {LOCK_FILE} and not is_link
    except NotADirectoryError:
        is_empty = False
    if not is_empty:
        raise UserError(
            f"{directory} exists, but is not a directory of chunks of {name}: it is a link or has no valid {JOB_FILE}. "
            "Nothing in it was changed. Move it away, or choose another output."
        )


def merge(
    path: str,
    directory: Directory,
    chunks: Sequence[str],
    before_rename: Callable[[Digest], None] = lambda digest: None,
) -> None:
    """Concatenate the files `chunks` of a directory into one file. Those that have a `.COMPLETED` file are verified.

    Args:
      before_rename: called with the digest of the merged file before it gets its final name.
    """
    whole, size = hashlib.sha256(), 0
    parent, name = split(path)
    try:
        with parent.new_file(name) as file:
            for start in range(0, len(chunks), _MERGED_AT_ONCE):
                group = chunks[start : start + _MERGED_AT_ONCE]
                with directory.reading(*(f"{chunk}{suffix}" for chunk in group for suffix in ("", COMPLETED))) as local:
                    for chunk in group:
                        record, digest = read_json(open_directory(local), chunk + COMPLETED) or {}, hashlib.sha256()
                        with open(os.path.join(local, chunk), "rb") as source:
                            while piece := source.read(1 << 20):
                                size += file.write(piece)
                                digest.update(piece)
                                whole.update(piece)
                        if record.get("sha256", digest.hexdigest()) != digest.hexdigest():
                            directory.remove(chunk + COMPLETED)
                            fix = "Run the same command again to recompute it and the chunks after it."
                            raise changed_error(directory.path(chunk), fix)
            before_rename({"size": size, "sha256": whole.hexdigest()})
    except OSError as error:
        raise jsonl.write_error(path, error) from error


def is_intact(directory: Directory, name: str, record: Mapping[str, Any]) -> bool:
    """Return whether a file still matches its record. A record without a size has no file."""
    return record.get("size") is None or directory.is_intact(name, record)


def changed_error(path: str, fix: str) -> UserError:
    """Return the error for a file that was changed after it was finished."""
    return UserError(f"{path} has changed since it was written (its SHA-256 differs). {fix}")


def read_json(directory: Directory, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing or damaged."""
    try:
        content = json.loads(directory.read_bytes(name) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class Output(abc.ABC):
    """An output that survives kills, because its chunks do.

        with FileOutput("out.jsonl", overwrite=False) as output:
            finished = output.begin(job)
            output.write(lines, record)
            output.finish()

    All processes call it; the first one writes.

    Args:
      path: path of the file.

    Attributes:
      directory: directory of the chunks.
      overwrite: discard chunks of another job.
      merged: an earlier run merged the file and was killed before it could remove the chunks.
      is_stdout: whether it is standard output, not a file.
    """

    is_stdout = False
    _restart_hint = ""

    def __init__(self, path: str, *, overwrite: bool = False):
        self.path = path
        self.overwrite = overwrite
        self.merged = False
        self._chunks: Chunks | None = None
        self._parent, self._name = split(path)
        self.directory = self._parent.path(f"tmp-{self._name}")

    def begin(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of the chunks that an earlier run of this job finished.

        Args:
          job: what the results depend on; see `Chunks`.
        """
        state = distributed.decide("output/begin", lambda: self._open(job))
        self.merged = state["merged"]
        if state["finished"]:
            log.info("resuming after %d finished chunk(s) in %s", len(state["finished"]), self.directory)
        return state["finished"][:]

    def write(self, content: Any, record: Mapping[str, Any]) -> None:
        """Write the next chunk and what a later run needs to know about it."""
        if self._chunks is not None:
            self._chunks.write(lambda path: self._write_chunk(path, content), record)

    def discard(self, first: int) -> None:
        """Discard chunk `first` and all after it."""
        self.merged = False
        if self._chunks is not None:
            self._chunks.discard(first)

    def finish(self, after_merge: Callable[[str], None] = lambda path: None) -> None:
        """Merge the chunks, call `after_merge` with the path of the output, and remove the chunks."""
        if self._chunks is not None:
            self._chunks.merge(self.path)
            after_merge(self.path)
            self._chunks.remove()
            log.info("wrote %s", self.path)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._chunks is not None:
            if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
                log.info(
                    "%d chunk(s) are finished in %s; run the same command again to resume after them",
                    len(self._chunks.finished), self.directory,
                )  # fmt: skip
            self._chunks.close()

    def _open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        hint = f"{self._restart_hint}remove {self.directory}"
        self._chunks = Chunks(self.directory, self._name, job, discard_others=self.overwrite, restart_hint=hint)
        merged = self._claim(self._chunks)
        return {"finished": self._chunks.finished, "merged": merged}

    def _claim(self, chunks: Chunks) -> bool:
        """Return whether the output is there, merged from these chunks."""
        return False

    @abc.abstractmethod
    def _write_chunk(self, path: str, content: Any) -> None:
        """Write the content of a chunk to `path`."""


class FileOutput(Output):
    """Lines in a file, or on standard output.

    Args:
      path: path of the file; - is standard output, which does not survive a kill.
      overwrite: replace an existing file and chunks of another job.
      also: {flag: path} of files that are made from the complete output.
      inputs: {flag: path} of files that the run reads. It must not write to any of them.
    """

    _restart_hint = "pass --overwrite, or "

    def __init__(
        self,
        path: str,
        *,
        overwrite: bool,
        also: Mapping[str, str] | None = None,
        inputs: Mapping[str, str | None] | None = None,
    ):
        super().__init__(path, overwrite=overwrite)
        self.is_stdout = path == "-"
        self._also = dict(also or {})
        if not self.is_stdout:
            distributed.decide("output/check", lambda: self._check({"output": path, **self._also}, inputs or {}))

    def begin(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [] if self.is_stdout else super().begin({**job, "also": self._also} if self._also else job)

    def write(self, content: Iterable[bytes], record: Mapping[str, Any]) -> None:
        if not self.is_stdout:
            super().write(content, record)
        elif distributed.is_leader():
            try:
                sys.stdout.buffer.writelines(content)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise jsonl.write_error("standard output", error) from error

    def _claim(self, chunks: Chunks) -> bool:
        merged = chunks.claim(self.path, overwrite=self.overwrite)
        if not merged and not self.overwrite and self._parent.exists(self._name):
            raise _exists_error("output", self.path)
        return merged

    def _write_chunk(self, path: str, content: Iterable[bytes]) -> None:
        with open(path, "xb") as file:
            file.writelines(content)

    def _check(self, paths: Mapping[str, str], inputs: Mapping[str, str | None]) -> None:
        """Raise a UserError if a file cannot be written, is an input, or exists and is not from a killed run."""
        chunks = open_directory(self.directory)
        for flag, path in paths.items():
            for input_flag, source in inputs.items():
                if source is not None and _is_same_file(path, source):
                    raise UserError(f"--{flag} {path} is the file that --{input_flag} {source} reads. Choose another.")
            parent, name = split(path)
            if parent.is_directory(name):
                raise UserError(f"--{flag} {path} is a directory. Pass the path of a file.")
            if parent.exists(name) and not self.overwrite and not chunks.exists(JOB_FILE):
                chunks.remove_itself()  # if empty, it is left from a run that was killed in its last step
                raise _exists_error(flag, path)
            with located(f"--{flag} {path}"):
                parent.check_writable()
        refuse_foreign(chunks, self._name)


def _is_same_file(path: str, source: str) -> bool:
    """Return whether both paths, links resolved, are the same existing file."""
    if is_remote(path):
        return path == source
    return os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source)


def _exists_error(flag: str, path: str) -> UserError:
    return UserError(f"{path} exists already. Pass another --{flag}, or --overwrite to replace it.")
