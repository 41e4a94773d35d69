"""Where results are written: a file that is put together of finished chunks, or standard output."""

import hashlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from t5x.checkpoints import agreement
from t5x.errors import UserError
from t5x.inference.chunks import Chunks
from t5x.inference.lines import Line
from t5x.partitioning import distributed
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)


class Output:
    """An output that survives kills: chunk by chunk in `tmp-<name>/`, whole when all are there.

        with Output("out.jsonl", overwrite=False) as output:
            finished = output.begin(job)
            output.write(lines, record)
            output.finish()

    Several processes all call it; the first one writes.

    Args:
      path: of the file; - is standard output, which nothing survives.
      overwrite: replace a file that exists, and chunks of another job.
      also: {flag: path} of files that `finish` makes of the whole.

    Attributes:
      merged: an earlier run has put the file together and was ended before it could remove the chunks.
      directory: of the chunks.
    """

    def __init__(self, path: str, *, overwrite: bool, also: Mapping[str, str] | None = None):
        self.path = path
        self.overwrite = overwrite
        self.merged = False
        self._chunks: Chunks | None = None
        parent, name = os.path.split(os.path.abspath(path))
        self.directory = os.path.join(parent, f"tmp-{name}")
        self._also = dict(also or {})
        if path != "-":
            agreement.decide("output/check", lambda: self._check({"output": path, **self._also}))

    def begin(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records of the chunks that an earlier run of this job finished.

        Args:
          job: what the results depend on, see `Chunks`.
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

        told = agreement.decide("output/begin", start)
        self.merged = told["merged"]
        if told["finished"]:
            log.info("going on behind %d finished chunk(s) of %s", len(told["finished"]), self.directory)
        return told["finished"][:]

    def discard(self, first: int) -> None:
        """Chunk `first` and all behind it."""
        self.merged = False
        if self._chunks is not None:
            self._chunks.discard(first)

    def write(self, lines: Iterable[bytes], record: Mapping[str, Any]) -> None:
        """The next chunk, and what a later run needs to know of it."""
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
        """Puts the chunks together, calls `then`, which makes other files of the whole, and removes the chunks."""
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

    def _check(self, paths: Mapping[str, str]) -> None:
        """A UserError where a file cannot be written, or would be replaced by a run that does not go on."""
        for flag, path in paths.items():
            parent = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path):
                raise UserError(f"--{flag} {path} is a directory; name a file.")
            if not os.path.isdir(parent):
                raise UserError(f"--{flag} {path}: there is no directory {parent}.")
            if os.path.exists(path) and not self.overwrite and not os.path.isdir(self.directory):
                raise _exists(flag, path)


def behind_finished(
    output: Output, path: str, parts: Iterator[list[Line]], finished: Sequence[Mapping[str, Any]], first: int
) -> tuple[int, Iterator[list[Line]]]:
    """(how many finished chunks are of the lines that are there now, the parts of the lines behind them).

    Where these are not all of them, the input has changed: a UserError, or with `overwrite` the others are discarded.

    Args:
      path: of the input.
      finished: what `output.begin` gave; a record has `input`, the `digest` of its part.
      first: the index of the first line.
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
    """Of lines, and of where they stand, which keys their samples."""
    return hashlib.sha256(b"".join([b"%d\n" % first, *(line.raw for line in part)])).hexdigest()


def _exists(flag: str, path: str) -> UserError:
    return UserError(f"{path} exists already; give another --{flag}, or --overwrite to replace it.")


def _write(path: str, lines: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        file.writelines(lines)
