"""The output of inference: a file merged from finished chunks, or standard output."""

import contextlib
import hashlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from t5x.errors import UserError
from t5x.inference.chunks import JOB_FILE, Chunks, refuse_foreign
from t5x.inference.input_lines import Line
from t5x.partitioning import distributed
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)


class Output:
    """An output that survives kills: it is written in chunks to `tmp-<name>/`, which are merged at the end.

        with Output("out.jsonl", overwrite=False) as output:
            finished = output.begin(job)
            output.write(lines, record)
            output.finish()

    All processes call it; the first one writes.

    Args:
      path: path of the file; - is standard output, which does not survive a kill.
      overwrite: replace an existing file and chunks of another job.
      also: {flag: path} of files that `finish` makes from the complete output.
      inputs: {flag: path} of files that the run reads. It must not write to any of them.

    Attributes:
      merged: an earlier run merged the file and was killed before it could remove the chunks.
      directory: directory of the chunks.
    """

    def __init__(
        self,
        path: str,
        *,
        overwrite: bool,
        also: Mapping[str, str] | None = None,
        inputs: Mapping[str, str | None] | None = None,
    ):
        self.path = path
        self.overwrite = overwrite
        self.merged = False
        self._chunks: Chunks | None = None
        parent, name = os.path.split(os.path.abspath(path))
        self.directory = os.path.join(parent, f"tmp-{name}")
        self._job_file = os.path.join(self.directory, JOB_FILE)
        self._also = dict(also or {})
        if path != "-":
            distributed.decide("output/check", lambda: self._check({"output": path, **self._also}, inputs or {}))

    def begin(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of the chunks that an earlier run of this job finished.

        Args:
          job: what the results depend on; see `Chunks`.
        """
        if self.path == "-":
            return []

        if self._also:
            job = {**job, "also": self._also}

        def start() -> dict[str, Any]:
            self._chunks = chunks = Chunks(
                self.directory, os.path.basename(self.path), job, start_anew=self.overwrite,
                mend=f"give --overwrite, or remove {self.directory}",
            )  # fmt: skip
            owned = chunks.claim(self.path, anew=self.overwrite)
            if os.path.exists(self.path) and not owned and not self.overwrite:
                raise _exists("output", self.path)
            return {"finished": chunks.finished, "merged": owned}

        told = distributed.decide("output/begin", start)
        self.merged = told["merged"]
        if told["finished"]:
            log.info("going on behind %d finished chunk(s) of %s", len(told["finished"]), self.directory)
        return told["finished"][:]

    def discard(self, first: int) -> None:
        """Discard chunk `first` and all after it."""
        self.merged = False
        if self._chunks is not None:
            self._chunks.discard(first)

    def write(self, lines: Iterable[bytes], record: Mapping[str, Any]) -> None:
        """Write the next chunk and what a later run needs to know about it."""
        if self._chunks is not None:
            self._chunks.write(lambda path: _write(path, lines), record)
        elif self.path == "-" and distributed.is_leader():
            try:
                sys.stdout.buffer.writelines(lines)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise jsonl.write_error("standard output", error) from error

    def finish(self, then: Callable[[], None] = lambda: None) -> None:
        """Merge the chunks, call `then`, which makes other files from the output, and remove the chunks."""
        if self._chunks is not None:
            self._chunks.merge(self.path)
            then()
            self._chunks.remove()
            log.info("wrote %s", self.path)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._chunks is not None:
            if kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit):
                log.info(
                    "%d chunk(s) are finished, in %s: the same command goes on behind them",
                    len(self._chunks.finished), self.directory,
                )  # fmt: skip
            self._chunks.close()

    def _check(self, paths: Mapping[str, str], inputs: Mapping[str, str | None]) -> None:
        """Raise a UserError if a file cannot be written, is an input, or exists and is not of a killed run."""
        for flag, path in paths.items():
            for given, source in inputs.items():
                if source is not None and os.path.exists(source) and _is_same_file(path, source):
                    raise UserError(f"--{flag} {path} is the file that --{given} {source} reads. Name another file.")
            parent = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path):
                raise UserError(f"--{flag} {path} is a directory; name a file.")
            if not os.path.isdir(parent):
                raise UserError(f"--{flag} {path}: there is no directory {parent}.")
            if os.path.exists(path) and not self.overwrite and not os.path.exists(self._job_file):
                with contextlib.suppress(OSError):
                    os.rmdir(self.directory)  # if empty, it is left from a run that was killed in its last step
                raise _exists(flag, path)
        refuse_foreign(self.directory, os.path.basename(self.path))


def behind_finished(
    output: Output, path: str, parts: Iterator[list[Line]], finished: Sequence[Mapping[str, Any]], first: int
) -> tuple[int, Iterator[list[Line]]]:
    """Return the number of finished chunks that match the input, and the parts of the input after them.

    If not all match, the input has changed: this is a UserError, or with `overwrite` the other chunks are discarded.

    Args:
      path: path of the input.
      finished: what `output.begin` returned; `input` of a record is the `digest` of its part.
      first: index of the first line.
    """
    changed, kept = "", len(finished)
    for number, record in enumerate(finished):
        part = next(parts, None)
        if part is None:
            changed, kept = "it ends before the lines", number
        elif record["input"] != digest(part, first):
            changed, kept = f"lines {part[0].number} to {part[-1].number} are not those", number
            parts = itertools.chain([part], parts)
        if changed:
            break
        first += len(part)
    if output.merged and not changed and (part := next(parts, None)):
        changed, parts = "it goes on behind the lines", itertools.chain([part], parts)
    if changed:
        changed = f"{path} has changed: {changed} that {output.directory} has results of"
        if not output.overwrite:
            raise UserError(f"{changed}. Give --overwrite to start anew.")
        log.warning("%s; %d of %d finished chunk(s) are discarded", changed, len(finished) - kept, len(finished))
        output.discard(kept)
    return kept, parts


def digest(part: Sequence[Line], first: int) -> str:
    """Return a hash of the lines and of the first one's index, which keys their samples."""
    return hashlib.sha256(b"".join([b"%d\n" % first, *(line.raw for line in part)])).hexdigest()


def _exists(flag: str, path: str) -> UserError:
    return UserError(f"{path} exists already; give another --{flag}, or --overwrite to replace it.")


def _is_same_file(path: str, source: str) -> bool:
    """Return whether both paths, links resolved, are the same file."""
    return os.path.exists(path) and os.path.samefile(path, source)


def _write(path: str, lines: Iterable[bytes]) -> None:
    with open(path, "xb") as file:
        file.writelines(lines)
