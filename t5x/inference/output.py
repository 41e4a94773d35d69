"""The output of a job: chunks in `tmp-<name>/` that become one file, or standard output."""

import abc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from t5x._runtime.errors import UserError, located
from t5x.files.directory import open_directory, split
from t5x.files.remote import is_remote
from t5x.inference.chunks import JOB_FILE, Chunks, refuse_foreign
from t5x.partitioning import distributed
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)


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
        self._chunks = Chunks(
            self.directory, self._name, job, discard_others=self.overwrite, restart_hint=f"remove {self.directory}"
        )
        return {"finished": self._chunks.finished, "merged": False}

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

    def _open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self._chunks = chunks = Chunks(
            self.directory, self._name, job, discard_others=self.overwrite,
            restart_hint=f"pass --overwrite, or remove {self.directory}",
        )  # fmt: skip
        merged = chunks.claim(self.path, overwrite=self.overwrite)
        if not merged and not self.overwrite and self._parent.exists(self._name):
            raise _exists_error("output", self.path)
        return {"finished": chunks.finished, "merged": merged}

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
