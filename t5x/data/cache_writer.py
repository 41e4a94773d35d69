"""Write caches of tasks, shard by shard and in parallel. See `t5x.data.cache_reader` for their format.

A shard is written to a temporary file and renamed, then its summary (shard-00000.json) is written; a shard with both is
finished. After a kill at any moment, finished and intact shards are kept and the others are written.
"""

import contextlib
import functools
import json
import logging
import os
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x.data import cache_reader, example_encoding, worker_process
from t5x.data.data_fingerprint import or_none
from t5x.data.pipeline import Example, Pipeline, count_cacheable
from t5x.data.sources import BadExample
from t5x.data.tasks import Task
from t5x.errors import UserError
from t5x.files import atomic, locks
from t5x.files.digests import digest_of
from t5x.files.disk_space import free_bytes, human_size
from t5x.telemetry.progress import Progress

logger = logging.getLogger(__name__)

EXAMPLES_PER_SHARD = 10_000
_MAX_SHARDS = 256  # larger splits have larger shards
_OURS = re.compile(r"(shard-\d{5,}\.(array_record|json)|info\.json|COMPLETED)(\.tmp-[0-9]+(-[0-9a-f]{8}){0,2})?")
_WRITER_OPTIONS = "group_size:1"  # decompress records one at a time
_SECONDS_BETWEEN_REPORTS = 0.5

Summary = dict[str, Any]


class Written(NamedTuple):
    """The result of writing a cache.

    Attributes:
      path: its directory.
      examples: number of finished examples.
      tokens: number of tokens in all output features.
      bytes: size of all shards.
      bad: number of source examples that were skipped.
      made: number of shards written now; the others existed.
      shards: number of shards.
      seconds: time taken.
    """

    task: str
    split: str
    path: str
    examples: int
    tokens: int
    bytes: int
    bad: int
    made: int
    shards: int
    seconds: float


class Work(NamedTuple):
    """Everything needed to write any shard of a cache.

    Attributes:
      pipeline: pipeline of the cached preprocessors.
      path: directory of the cache.
    """

    pipeline: Pipeline
    path: str
    num_examples: int
    examples_per_shard: int
    drop_text: bool
    skip_bad_examples: bool

    def indices(self, number: int) -> range:
        start = number * self.examples_per_shard
        return range(start, min(start + self.examples_per_shard, self.num_examples))


def write(
    task: Task,
    split: str,
    *,
    directory: str | None = None,
    num_workers: int | None = None,
    overwrite: bool = False,
    drop_text: bool = False,
    skip_bad_examples: bool = False,
    runner: str | None = None,
    examples_per_shard: int | None = None,
) -> Written:
    """Write the cache of a split, or its missing shards.

    Args:
      directory: directory of all caches; None is the first of T5X_TASK_CACHES.
      num_workers: number of processes; None is one per core. 0 works in this process.
      overwrite: replace a cache that does not match the task.
      drop_text: drop the texts that `tokenize` keeps (`*_pretokenized`).
      skip_bad_examples: skip and count examples that cannot be read; False raises an error for the first.
      runner: Apache Beam runner that writes the shards.
      examples_per_shard: number of source examples; None is 10,000, or more for very large splits.
    """
    began = time.monotonic()
    if reason := task.why_not_cached():
        raise UserError(reason)
    steps = count_cacheable(task.preprocessors)
    task.source.check_split(split)
    described = cache_reader.identity(task, split, steps)
    pipeline = Pipeline(task.name, task.source, split, task.preprocessors[:steps], task.output_features)
    count = len(pipeline)
    path = cache_reader.place(directory or _default_directory(), task.name, split)
    info = {
        "format": cache_reader.FORMAT,
        "task": task.name,
        "split": split,
        "num_examples": count,
        "examples_per_shard": examples_per_shard or max(EXAMPLES_PER_SHARD, -(-count // _MAX_SHARDS)),
        "drop_text": drop_text,
        "identity": described,
        "content": or_none(lambda: task.source.content_fingerprint(split)(), task.name),
    }
    with _exclusive(path):
        info = _prepare(path, info, overwrite)
        work = Work(pipeline, path, count, info["examples_per_shard"], drop_text, skip_bad_examples)
        shards = len(cache_reader.records_of_shards(count, work.examples_per_shard))
        finished = {number: found for number in range(shards) if (found := _finished(work, number)) is not None}
        missing = [number for number in range(shards) if number not in finished]
        if missing:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(path, cache_reader.COMPLETED))
            finished |= _make(work, missing, num_workers, runner)
        _complete(path, {"shards": [finished[n] for n in range(shards)]})
    total = {
        name: sum(summary[name] for summary in finished.values()) for name in ("examples", "tokens", "bytes", "bad")
    }
    return Written(task.name, split, path, **total, made=len(missing), shards=shards, seconds=time.monotonic() - began)


def write_shard(work: Work, number: int, report: Callable[[int], None] = lambda count: None) -> Summary:
    """Write a shard atomically.

    Args:
      report: called now and then with the number of source examples done since the last call.
    """
    from array_record.python import array_record_module

    path = os.path.join(work.path, cache_reader.shard_name(number))
    indices = work.indices(number)
    summary = {"records": len(indices), "examples": 0, "tokens": 0, "bad": 0}
    reported, told = 0, time.monotonic()
    try:
        with atomic.new_file(path) as file:
            writer = array_record_module.ArrayRecordWriter(file.name, _WRITER_OPTIONS)
            for done, index in enumerate(indices, 1):
                examples = _made(work, index, summary)
                summary["examples"] += len(examples)
                summary["tokens"] += sum(_tokens(example, work.pipeline.output_features) for example in examples)
                writer.write(_encoded(work, examples, index))
                if time.monotonic() - told > _SECONDS_BETWEEN_REPORTS:
                    report(done - reported)
                    reported, told = done, time.monotonic()
            writer.close()
            there = array_record_module.ArrayRecordReader(file.name).num_records()
            if there != len(indices):
                raise RuntimeError(f"{there} of {len(indices)} records arrived in {file.name}")
            summary |= _measure(file.name)
        _write_json(_summary_path(work.path, number), summary)
    except (OSError, RuntimeError) as error:
        _check_disk(work.path, error)
        raise
    report(len(indices) - reported)
    return summary


def _made(work: Work, index: int, summary: Summary) -> list[Example]:
    try:
        examples = work.pipeline.unfinished(0, index)
    except BadExample as error:
        if not work.skip_bad_examples:
            raise
        summary["bad"] += 1
        if summary["bad"] == 1:
            logger.warning("passed over: %s; further ones of this shard are counted, not reported", error)
        return []
    if work.drop_text:
        return [{name: value for name, value in one.items() if not name.endswith("_pretokenized")} for one in examples]
    return examples


def _encoded(work: Work, examples: list[Example], index: int) -> bytes:
    try:
        return example_encoding.encode(examples)
    except UserError as error:
        raise BadExample(f"{work.pipeline.location(index)}: {error}") from error


def _tokens(example: Example, features: Iterable[str]) -> int:
    found = [example[name] for name in features if name in example]
    return sum(value.size if isinstance(value, np.ndarray) else 0 for value in found)


# --- The directory ----------------------------------------------------------------------------------------------------


def _default_directory() -> str:
    found = cache_reader.directories()
    if not found:
        raise UserError("T5X_TASK_CACHES is empty, or T5X_CACHE_DIR is remote. Name a local directory: --output_dir.")
    return found[0]


@contextlib.contextmanager
def _exclusive(path: str) -> Iterator[None]:
    """Create the directory and lock it against other writers."""
    with contextlib.ExitStack() as stack:
        try:
            atomic.make_directories(path)
            stack.enter_context(locks.locked(path, wait=False))
        except BlockingIOError as error:
            raise UserError(f"Another process is writing the cache {path}. Wait until it has ended.") from error
        except OSError as error:
            raise UserError(f"The cache {path} cannot be written: {error.strerror}. Choose --output_dir.") from error
        try:
            yield
        except OSError as error:
            _check_disk(path, error)
            if os.fspath(error.filename or "").startswith(path):
                raise UserError(f"{error.filename} cannot be written: {error.strerror}. Remove {path}.") from error
            raise


def _prepare(path: str, info: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Remove files that do not belong to `info`; return the content of info.json."""
    there, reason = None, []
    try:
        there = cache_reader.read_json(os.path.join(path, cache_reader.INFO))
        with cache_reader.well_formed(cache_reader.INFO):
            reason = _reasons(there, info) if there is not None else []
    except cache_reader.Unusable as error:
        logger.warning("%s: %s; the whole cache is made again", path, error)
        there = None
    if reason and not overwrite:
        raise UserError(
            f"{path} holds a cache of another state of the task: {'; '.join(reason)}. --overwrite replaces it."
        )
    if there is None or reason or overwrite:
        _clear(path)
        _write_json(os.path.join(path, cache_reader.INFO), info)
        return info
    _clear(path, only_unfinished=True)
    return there


def _clear(path: str, only_unfinished: bool = False) -> None:
    for name in sorted(os.listdir(path)):  # removes COMPLETED first
        if _OURS.fullmatch(name) and (".tmp-" in name or not only_unfinished):
            os.remove(os.path.join(path, name))


def _reasons(there: dict[str, Any], info: dict[str, Any]) -> list[str]:
    if there.get("format") != info["format"]:
        return [f"its format is {there.get('format')}, not {info['format']}"]
    found = cache_reader.describe_differences(there["identity"], info["identity"])
    if there["drop_text"] != info["drop_text"]:
        found.append("it has no texts (--drop_text)" if there["drop_text"] else "it has texts (no --drop_text)")
    if there["num_examples"] != info["num_examples"]:
        found.append(f"it is of {there['num_examples']} source examples, and there are {info['num_examples']}")
    if type(there["examples_per_shard"]) is not int or there["examples_per_shard"] < 1:
        raise ValueError(f"'examples_per_shard' is {there['examples_per_shard']!r}")
    return found


def _finished(work: Work, number: int) -> Summary | None:
    """Return the summary of a shard, or None unless it is finished and intact."""
    try:
        summary = cache_reader.read_json(_summary_path(work.path, number))
        if summary is None:
            return None
        shard = os.path.join(work.path, cache_reader.shard_name(number))
        expected = {"records": len(work.indices(number))} | _measure(shard)
    except (OSError, cache_reader.Unusable):
        expected = None
    counted = expected is not None and all(type(summary.get(name)) is int for name in ("examples", "tokens", "bad"))
    if not counted or any(summary.get(name) != value for name, value in expected.items()):
        logger.warning("%s in %s is damaged or gone; it is made again", cache_reader.shard_name(number), work.path)
        return None
    return summary


def _complete(path: str, content: dict[str, Any]) -> None:
    """Write COMPLETED, unless it exists and is correct."""
    file = os.path.join(path, cache_reader.COMPLETED)
    try:
        there = cache_reader.read_json(file)
    except cache_reader.Unusable:
        there = {}
    if there is not None and there != content:
        logger.warning("%s is damaged; it is written again", file)
    if there != content:
        _write_json(file, content)


def _measure(path: str) -> Summary:
    digest = digest_of(path)
    return {"bytes": digest["size"], "sha256": digest["sha256"]}


def _summary_path(path: str, number: int) -> str:
    return os.path.join(path, cache_reader.shard_name(number).replace(".array_record", ".json"))


def _write_json(path: str, content: Any) -> None:
    with atomic.new_file(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def _check_disk(path: str, error: Exception) -> None:
    """Raise a UserError if the disk is full, which array_record reports only in its message."""
    if any(words in str(error) for words in ("No space left", "Disk quota")):
        free = free_bytes(path)
        room = "" if free is None else f" ({human_size(free)} free)"
        raise UserError(
            f"The cache does not fit on the disk of {path}{room}. Make room and start again, which keeps the finished "
            "shards; or write to another disk (--output_dir), or less (--drop_text)."
        ) from error


# --- Writing shards ---------------------------------------------------------------------------------------------------


def _make(work: Work, missing: Sequence[int], num_workers: int | None, runner: str | None) -> dict[int, Summary]:
    if runner is not None:
        return _make_with_beam(work, missing, runner)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores if num_workers is None else num_workers, len(missing))
    total = sum(len(work.indices(number)) for number in missing)
    with Progress(total, unit="example", description=f"{work.pipeline.name} {work.pipeline.split}") as progress:
        report = _Rate(progress)
        if count <= 1:
            return {number: write_shard(work, number, report) for number in missing}
        return _make_in_processes(work, missing, count, report)


class _Rate:
    """Counts finished examples and shows their rate."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._began = time.monotonic()
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        rate = self._done / max(time.monotonic() - self._began, 1e-9)
        self._progress.update(self._done, **{"examples/s": rate})


def _make_in_processes(
    work: Work, missing: Sequence[int], count: int, report: Callable[[int], None]
) -> dict[int, Summary]:
    payload = worker_process.pickled(work, "Give --num_workers=0")
    waiting = iter(missing)
    answers: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    workers = [worker_process.start("t5x.data.cache_writer:serve") for _ in range(count)]
    finished: dict[int, Summary] = {}

    def listen(number: int) -> None:
        while (content := worker_process.read(workers[number].stdout)) is not None:
            answers.put((number, json.loads(content)))
        answers.put((number, None))

    def command(number: int, content: bytes) -> None:
        with contextlib.suppress(OSError):  # it has died; its other pipe reports it
            worker_process.write(workers[number].stdin, content)
            workers[number].stdin.flush()

    def begin(number: int) -> None:
        command(number, payload)
        command(number, str(next(waiting)).encode())

    try:
        for number in range(count):
            threading.Thread(target=listen, args=(number,), daemon=True).start()
            begin(number)
        while len(finished) < len(missing):
            number, answer = answers.get()
            if answer is None:
                fix = "Start again, which keeps the finished shards; fewer processes (--num_workers) need less memory."
                raise worker_process.unexpected_end(workers[number], "A worker process", fix)
            if "error" in answer:
                raise {"bad": BadExample, "user": UserError}.get(answer["kind"], RuntimeError)(answer["error"])
            report(answer.get("done", 0))
            if "shard" in answer:
                finished[answer["shard"]] = answer["summary"]
                if (following := next(waiting, None)) is not None:
                    command(number, str(following).encode())
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
        _clear(work.path, only_unfinished=True)
    return finished


def serve() -> None:
    """Run a worker process."""
    source, output = worker_process.pipes()
    payload = worker_process.read(source)
    if payload is None:
        return

    def answer(**content: Any) -> None:
        worker_process.write(output, json.dumps(content).encode())
        output.flush()

    commands = worker_process.listen(source)
    try:
        work = worker_process.unpickled(payload)
        while True:
            number = int(commands.get())
            answer(shard=number, summary=write_shard(work, number, lambda count: answer(done=count)))
    except BrokenPipeError:
        pass
    except UserError as error:
        answer(kind="bad" if isinstance(error, BadExample) else "user", error=str(error))
    except Exception:
        answer(kind="bug", error=f"in a worker process:\n{traceback.format_exc()}")


def _make_with_beam(work: Work, missing: Sequence[int], runner: str) -> dict[int, Summary]:
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(
            f"--runner needs Apache Beam ({error}). `pip install apache-beam`, or `pip install -e '.[beam]'` in the "
            "checkout of t5x. Without --runner, processes of this machine do it (--num_workers)."
        ) from error
    payload = worker_process.pickled(work, "Leave out --runner and give --num_workers=0")
    options = PipelineOptions(["--runner", runner])
    logger.info("Beam's %s makes %d shard(s)", runner, len(missing))
    try:
        pipeline = apache_beam.Pipeline(options=options)
    except ValueError as error:
        raise UserError(f"--runner={runner}: {error}") from error
    with _safe_path_in_children(), pipeline:
        shards = pipeline | apache_beam.Create(list(missing)) | apache_beam.Reshuffle()
        _ = shards | "WriteShard" >> apache_beam.Map(functools.partial(_write_pickled, payload))
    finished = {number: found for number in missing if (found := _finished(work, number)) is not None}
    if len(finished) < len(missing):
        raise UserError(
            f"Beam's {runner} left {len(missing) - len(finished)} shard(s) unwritten in {work.path}. Its workers must "
            "see that directory."
        )
    return finished


@contextlib.contextmanager
def _safe_path_in_children() -> Iterator[None]:
    """Keep the working directory off the path of interpreters that are started with this process's environment."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _write_pickled(payload: bytes, number: int) -> None:
    write_shard(_unpickled(payload), number)


_unpickled = functools.lru_cache(maxsize=1)(worker_process.unpickled)
