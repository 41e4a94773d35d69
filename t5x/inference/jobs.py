"""Jobs: work that is computed and written in chunks, so that a killed run resumes after the last finished one.

`infer`, `answer`, `rerank` and task inference are jobs. A job defines what its results depend on, where to resume, and
how to compute a chunk; `run_job` does everything else.
"""

import abc
import dataclasses
import hashlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from t5x._runtime.errors import UserError, check_at_least
from t5x.inference.input_lines import Line, Lines
from t5x.inference.output import Output
from t5x.partitioning import distributed
from t5x.telemetry import Progress, jsonl

log = logging.getLogger(__name__)

Record = Mapping[str, Any]


class ResumableJob(abc.ABC):
    """Work that is computed and written in chunks, so that a killed run resumes.

    Attributes:
      description, unit: what the progress display shows.
      counted: the field of a chunk's record with the number of units in it.
      total: number of units; None if unknown.
      quiet_up_to: show no progress for so few units.
    """

    description: str
    unit: str = "example"
    counted: str = "examples"
    total: int | None = None
    quiet_up_to: int = 0

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what the results depend on, as JSON. Chunks of another identity are not resumed."""

    @abc.abstractmethod
    def resume(self, finished: Sequence[Record], output: Output) -> tuple[list[Record], Iterator[Any]]:
        """Return the finished chunks that can be kept, from the first on, and the chunks after them."""

    @abc.abstractmethod
    def compute(self, chunk: Any, progress: "JobProgress") -> tuple[Any, Record]:
        """Return the content of a chunk, for `Output.write`, and its record."""

    def after_merge(self, path: str) -> None:  # noqa: B027
        """Make other files from the complete output. A run that is killed in between repeats this."""


def run_job(job: ResumableJob, output: Output) -> list[Record]:
    """Compute the chunks that are missing and write the output. Return the records of all chunks.

    All processes call it: each computes its rows of every batch, and the first one writes.
    """
    with output:
        records, chunks = job.resume(output.begin(job.identity()), output)
        done = sum(record[job.counted] for record in records)
        is_short = job.total is not None and job.total <= job.quiet_up_to
        quiet = is_short or (output.is_stdout and sys.stdout.isatty())
        with JobProgress(job, done, quiet=quiet) as progress:
            for chunk in chunks:
                content, record = job.compute(chunk, progress)
                output.write(content, record)
                records.append(record)
        output.finish(job.after_merge)
    return records


class JobProgress(Progress):
    """Progress display with the rate, shown by the process that writes.

    Args:
      done: number of units finished before.
      quiet: show nothing.
    """

    def __init__(self, job: ResumableJob, done: int = 0, *, quiet: bool = False):
        super().__init__(job.total, done, job.unit, job.description, disable=quiet or not distributed.is_leader())
        self.done = done
        self._rate = f"{job.unit}s/s"

    def after_batch(self, units: int = 1, inputs: int = 1) -> Callable[[int], None]:
        """Return a callback for `Engine.run`: `inputs` finished inputs advance the progress by `units`."""
        before = self.done

        def show(finished: int) -> None:
            self.done = before + finished * units // inputs
            rate = (self.done - self._initial) / max(time.monotonic() - self._started, 1e-9)
            self.update(self.done, **{self._rate: rate})

        return show


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `count` contiguous parts of an input."""

    index: int = 0
    count: int = 1

    def range(self, total: int) -> range:
        """Return the indices of this part of `total` examples.

        >>> Shard(1, 3).range(8)
        range(2, 5)
        """
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)

    def path(self, output: str) -> str:
        """Return the output path of this shard; standard output (-) stays as it is."""
        return output if self.count == 1 or output == "-" else f"{output}-{self.index:05}-of-{self.count:05}"


WHOLE = Shard()


def check_counts(prefix: str, *, shard_id: int = 0, **counts: int | None) -> None:
    """Raise a UserError if a count is below 1, or `shard_id` is not below `num_shards`, one of the counts.

    Args:
      prefix: of the options in messages: `--` or `infer.`.
    """
    check_at_least(1, prefix, **counts)
    shards = counts.get("num_shards") or 1
    if not 0 <= shard_id < shards:
        raise UserError(
            f"{prefix}shard_id is {shard_id}: it must be 0 to {shards - 1}, as {prefix}num_shards is {shards}."
        )


class LineChunk(NamedTuple):
    """Consecutive lines of the input.

    Attributes:
      first: index of the first line in the whole input, which keys its samples.
      is_first: whether this is the first chunk; if it is short, it is the whole input.
    """

    first: int
    is_first: bool
    lines: list[Line]

    def digest(self) -> str:
        """Return a hash of the lines and of the first one's index."""
        return hashlib.sha256(b"".join([b"%d\n" % self.first, *(line.raw for line in self.lines)])).hexdigest()


@dataclasses.dataclass(kw_only=True)
class LineJob(ResumableJob):
    """A job over the lines of a file, all of which are checked first, or of a stream.

    Every line gets one line of output.

    Args:
      file: the input.
      shard: which part of it.
      batch_size: lines per batch.
      source: further options that the results depend on: `checkpoint_period`, in batches, and others.
    """

    file: Lines
    shard: Shard = WHOLE
    batch_size: int
    source: dict[str, Any]

    def __post_init__(self):
        if self.file.is_stream and (self.shard.count > 1 or jax.process_count() > 1):
            what = "--num_shards" if self.shard.count > 1 else "A run of several processes"
            raise UserError(f"{what} needs --input to be a file: a stream can be read only once.")
        self.quiet_up_to = self.batch_size
        self._start, self._stop = 0, None
        if (count := self.file.count()) is not None:
            part = self.shard.range(count)
            self._start, self._stop, self.total = part.start, part.stop, len(part)
            log.debug("%d %s(s) from %s", self.total, self.unit, self.file.path)

    @abc.abstractmethod
    def compute_lines(self, chunk: LineChunk, progress: JobProgress) -> tuple[list[Record], Record]:
        """Return an output record for each line, and what else to keep in the chunk's record."""

    def compute(self, chunk: LineChunk, progress: JobProgress) -> tuple[Iterator[bytes], Record]:
        results, more = self.compute_lines(chunk, progress)
        return map(jsonl.encode, results), {self.counted: len(chunk.lines), "input": chunk.digest(), **more}

    def resume(self, finished: Sequence[Record], output: Output) -> tuple[list[Record], Iterator[LineChunk]]:
        """See `ResumableJob`. Finished chunks are compared with the input.

        If the input has changed, this is a UserError, or with `overwrite` the chunks from there on are discarded.
        """
        chunks, change, unchanged = self._chunks(self.source["checkpoint_period"] * self.batch_size), "", 0
        for record in finished:
            chunk = next(chunks, None)
            if chunk is None:
                change = "it ends before the lines"
            elif record["input"] != chunk.digest():
                change = f"lines {chunk.lines[0].number} to {chunk.lines[-1].number} differ from those"
                chunks = itertools.chain([chunk], chunks)
            if change:
                break
            unchanged += 1
        if output.merged and not change and (chunk := next(chunks, None)):
            change, chunks = "it continues after the lines", itertools.chain([chunk], chunks)
        if change:
            change = f"{self.file.path} has changed: {change} whose results are in {output.directory}"
            if not output.overwrite:
                raise UserError(f"{change}. Pass --overwrite to start over.")
            log.warning("%s; discarding %d of %d finished chunk(s)", change, len(finished) - unchanged, len(finished))
            output.discard(unchanged)
        return list(finished[:unchanged]), chunks

    def _chunks(self, size: int) -> Iterator[LineChunk]:
        """Yield chunks of `size` lines; the last, and those before a pause of a live input, may be smaller."""
        first, lines = self._start, []
        try:
            for line in itertools.islice(self.file, self._start, self._stop):
                if line is not None:
                    lines.append(line)
                if lines and (line is None or len(lines) == size):
                    yield LineChunk(first, first == self._start, lines)
                    first, lines = first + len(lines), []
        except UserError:  # in a line of a stream; those before it have results
            if lines:
                yield LineChunk(first, first == self._start, lines)
            raise
        if lines:
            yield LineChunk(first, first == self._start, lines)
