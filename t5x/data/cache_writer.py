"""Write caches of tasks, shard by shard and in parallel. See `t5x.data.cache_reader` for their format.

A shard appears, locally or at a remote path, when it is complete; then its summary (shard-00000.json) is written; a
shard with both is finished. After a kill at any moment, finished and intact shards are kept and the others are written.
"""

import concurrent.futures
import contextlib
import errno
import functools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.data import cache_reader, example_encoding, worker_process
from t5x.data.data_fingerprint import try_fingerprint
from t5x.data.lanes import BadExamples
from t5x.data.pipeline import Example, Pipeline, count_cacheable
from t5x.data.sources import BadExample
from t5x.data.tasks import Task
from t5x.files.digests import digest_of
from t5x.files.directory import Directory, open_directory
from t5x.files.disk_space import free_bytes, human_size
from t5x.telemetry.progress import Progress

logger = logging.getLogger(__name__)

EXAMPLES_PER_SHARD = 10_000
_MAX_SHARDS = 256  # larger splits have larger shards
_OURS = re.compile(r"shard-\d{5,}\.(array_record|json)|info\.json|COMPLETED")
_THREADS = 8  # that verify shards
_WRITER_OPTIONS = "group_size:1"  # decompress records one at a time
_REPORTED_TOGETHER = 16  # examples; each report of a worker process is a message

Summary = dict[str, Any]


class CacheSummary(NamedTuple):
    """The result of writing a cache.

    Attributes:
      path: its directory.
      examples: number of finished examples.
      tokens: number of tokens in all output features.
      bytes: size of all shards.
      bad: number of source examples that were skipped.
      written: number of shards written now; the others existed.
      shards: number of shards.
      seconds: time taken.
    """

    path: str
    examples: int
    tokens: int
    bytes: int
    bad: int
    written: int
    shards: int
    seconds: float


class ShardWork(NamedTuple):
    """Everything needed to write any shard of a cache.

    Attributes:
      pipeline: pipeline of the cached preprocessors.
      path: directory of the cache.
      shards: source examples of each shard.
    """

    pipeline: Pipeline
    path: str
    shards: list[range]
    drop_text: bool
    skip_bad_examples: bool


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
) -> CacheSummary:
    """Write the cache of a split, or its missing shards.

    Args:
      directory: local or remote directory of all caches; None is the first of T5X_TASK_CACHES.
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
    pipeline = Pipeline(task.name, task.source, split, task.preprocessors[:steps], task.output_features)
    described = cache_reader.identity(task, split, steps)
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
        "content": try_fingerprint(lambda: task.source.content_fingerprint(split)(), task.name),
    }
    files = open_directory(path)
    with _exclusive(files) as check_lock:
        info = _prepare(files, info, overwrite)
        shards = cache_reader.shard_ranges(count, info["examples_per_shard"])
        work = ShardWork(pipeline, path, shards, drop_text, skip_bad_examples)
        finished = _finished(work, range(len(shards)))
        missing = [number for number in range(len(shards)) if number not in finished]
        if missing:
            files.remove(cache_reader.COMPLETED)
            finished |= _write_missing(work, missing, num_workers, runner)
        check_lock()
        completed = {"shards": [finished[number] for number in range(len(shards))]}
        _write_json(files, cache_reader.COMPLETED, completed)
    names = ("examples", "tokens", "bytes", "bad")
    totals = {name: sum(summary[name] for summary in finished.values()) for name in names}
    return CacheSummary(path, **totals, written=len(missing), shards=len(shards), seconds=time.monotonic() - began)


def write_shard(work: ShardWork, number: int, report: Callable[[int], None] = lambda count: None) -> Summary:
    """Write a shard atomically.

    Args:
      report: called repeatedly with the number of source examples done since the last call.
    """
    files = open_directory(work.path)
    indices = work.shards[number]
    summary: Summary = {"records": len(indices), "examples": 0, "tokens": 0}
    bad = BadExamples(work.skip_bad_examples)
    with _explain_full_disk(work.path):
        with files.new_file(cache_reader.shard_name(number)) as file:
            with example_encoding.open_writer(file.name, _WRITER_OPTIONS) as write_record:
                for done, index in enumerate(indices, 1):
                    examples = _preprocess(work, index, bad)
                    summary["examples"] += len(examples)
                    summary["tokens"] += sum(_tokens(example, work.pipeline.output_features) for example in examples)
                    with work.pipeline.located(index):
                        write_record(examples)
                    if done % _REPORTED_TOGETHER == 0:
                        report(_REPORTED_TOGETHER)
            digest = digest_of(file.name)
            summary |= {"bad": bad.count, "bytes": digest["size"], "sha256": digest["sha256"]}
        _write_json(files, _summary_name(number), summary)
    report(len(indices) % _REPORTED_TOGETHER)
    return summary


def _preprocess(work: ShardWork, index: int, bad: BadExamples) -> list[Example]:
    try:
        examples = work.pipeline.unfinished(0, index)
    except BadExample as error:
        bad.add(error)
        return []
    if work.drop_text:
        return [{name: value for name, value in one.items() if not name.endswith("_pretokenized")} for one in examples]
    return examples


def _tokens(example: Example, features: Iterable[str]) -> int:
    values = [example[name] for name in features if name in example]
    return sum(value.size if isinstance(value, np.ndarray) else 0 for value in values)


# --- The directory ----------------------------------------------------------------------------------------------------


def _default_directory() -> str:
    directories = cache_reader.directories()
    if not directories:
        raise UserError("T5X_TASK_CACHES is empty, or T5X_CACHE_DIR is remote. Set --output_dir.")
    return directories[0]


@contextlib.contextmanager
def _exclusive(files: Directory) -> Iterator[Callable[[], None]]:
    """Create the directory and lock it against other writers; see `Directory.locked`."""
    path = str(files)
    with contextlib.ExitStack() as stack:
        try:
            files.make()
            check_lock = stack.enter_context(files.locked())
        except BlockingIOError as error:
            raise UserError(f"Another process is writing the cache {path}. Wait until it has ended.") from error
        except OSError as error:
            raise UserError(f"Cannot write the cache {path}: {error.strerror}. Choose another --output_dir.") from error
        try:
            with _explain_full_disk(path):
                yield check_lock
        except OSError as error:
            if os.fspath(error.filename or "").startswith(path):
                raise UserError(f"Cannot write {error.filename}: {error.strerror}. Remove {path}.") from error
            raise


@contextlib.contextmanager
def _explain_full_disk(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = free_bytes(path)
        room = "" if free is None else f" ({human_size(free)} free)"
        raise UserError(
            f"The cache does not fit on the disk of {path}{room}. Free some space and run the same command again "
            "(finished shards are kept), write to another disk (--output_dir), or write less (--drop_text)."
        ) from error


def _prepare(files: Directory, info: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Remove files that do not belong to `info`; return the content of info.json."""
    existing, differences = None, []
    try:
        existing = cache_reader.read_json(files, cache_reader.INFO)
        if existing is not None:
            with cache_reader.well_formed(cache_reader.INFO):
                differences = _describe_differences(existing, info)
    except cache_reader.Unusable as error:
        logger.warning("%s: %s; rewriting the whole cache", files, error)
        existing = None
    if differences and not overwrite:
        raise UserError(
            f"{files} contains a cache of another state of the task: {'; '.join(differences)}. Pass --overwrite to "
            "replace it."
        )
    files.remove_temporaries()
    if existing is None or differences or overwrite:
        files.remove(cache_reader.COMPLETED)
        files.remove(*filter(_OURS.fullmatch, files.names()))
        _write_json(files, cache_reader.INFO, info)
        return info
    return existing


def _describe_differences(existing: dict[str, Any], info: dict[str, Any]) -> list[str]:
    if existing.get("format") != info["format"]:
        return [f"its format is {existing.get('format')}, not {info['format']}"]
    differences = cache_reader.describe_differences(existing["identity"], info["identity"])
    if existing["drop_text"] != info["drop_text"]:
        has_texts = "it has no texts (--drop_text)" if existing["drop_text"] else "it has texts (no --drop_text)"
        differences.append(has_texts)
    if existing["num_examples"] != info["num_examples"]:
        differences.append(f"it has {existing['num_examples']} source examples, not {info['num_examples']}")
    cache_reader.count_in(existing, "examples_per_shard", low=1)
    return differences


def _finished(work: ShardWork, numbers: Sequence[int]) -> dict[int, Summary]:
    """Return the summaries of those of the shards that are finished and intact."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        summaries = zip(numbers, pool.map(functools.partial(_summary_if_intact, work), numbers), strict=True)
        return {number: summary for number, summary in summaries if summary is not None}


def _summary_if_intact(work: ShardWork, number: int) -> Summary | None:
    files, name = open_directory(work.path), cache_reader.shard_name(number)
    try:
        summary = cache_reader.read_json(files, _summary_name(number))
        if summary is None:
            return None
        with cache_reader.well_formed(name):
            for key in ("examples", "tokens", "bad"):
                cache_reader.count_in(summary, key)
            digest = {"size": summary["bytes"], "sha256": summary["sha256"]}
        if summary["records"] == len(work.shards[number]) and files.is_intact(name, digest):
            return summary
    except (OSError, KeyError, cache_reader.Unusable):
        pass
    logger.warning("%s in %s is damaged or missing; rewriting it", name, work.path)
    return None


def _summary_name(number: int) -> str:
    return cache_reader.shard_name(number).replace(".array_record", ".json")


def _write_json(files: Directory, name: str, content: Any) -> None:
    files.write_bytes(name, json.dumps(content, indent=1).encode())


# --- Writing shards ---------------------------------------------------------------------------------------------------


def _write_missing(
    work: ShardWork, missing: Sequence[int], num_workers: int | None, runner: str | None
) -> dict[int, Summary]:
    if runner is not None:
        return _write_with_beam(work, missing, runner)
    count = min(worker_process.available_cores() if num_workers is None else num_workers, len(missing))
    total = sum(len(work.shards[number]) for number in missing)
    with Progress(total, unit="example", description=f"{work.pipeline.name} {work.pipeline.split}") as progress:
        began, done, reporting = time.monotonic(), 0, threading.Lock()

        def report(count: int) -> None:
            nonlocal done
            with reporting:
                done += count
                progress.update(done, **{"examples/s": done / max(time.monotonic() - began, 1e-9)})

        if count <= 1:
            return {number: write_shard(work, number, report) for number in missing}
        return _write_in_processes(work, missing, count, report)


def _write_in_processes(
    work: ShardWork, missing: Sequence[int], count: int, report: Callable[[int], None]
) -> dict[int, Summary]:
    content = worker_process.pickled(work, "Set --num_workers=0")
    fix = "Run the same command again (finished shards are kept); fewer processes (--num_workers) need less memory."
    workers = [
        worker_process.Worker(send_summary, content, f"Cache worker process {number}", fix) for number in range(count)
    ]
    waiting, summaries = iter(missing), {}

    def run(worker: worker_process.Worker) -> None:
        for number in waiting:
            worker.send(number)
            while isinstance(answer := worker.receive(), int):
                report(answer)
            summaries[number] = answer

    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        for ended in concurrent.futures.as_completed([pool.submit(run, worker) for worker in workers]):
            ended.result()
        return summaries
    finally:
        pool.shutdown(wait=False)
        for worker in workers:
            worker.stop()
        open_directory(work.path).remove_temporaries()


def send_summary(work: ShardWork, number: int, parent: worker_process.Parent) -> None:
    """Write a shard in a worker process."""
    parent.send(write_shard(work, number, report=parent.send))


def _write_with_beam(work: ShardWork, missing: Sequence[int], runner: str) -> dict[int, Summary]:
    beam = import_extra("apache_beam", "--runner needs a package: `pip install apache-beam`. Or omit it")
    from apache_beam.options.pipeline_options import PipelineOptions

    payload = worker_process.pickled(work, "Omit --runner and set --num_workers=0")
    options = PipelineOptions(["--runner", runner])
    logger.info("writing %d shard(s) with Beam's %s", len(missing), runner)
    try:
        pipeline = beam.Pipeline(options=options)
    except ValueError as error:
        raise UserError(f"--runner={runner}: {error}") from error
    with _safe_path_in_children(), pipeline:
        shards = pipeline | beam.Create(list(missing)) | beam.Reshuffle()
        _ = shards | "WriteShard" >> beam.Map(functools.partial(_write_pickled, payload))
    finished = _finished(work, missing)
    if len(finished) < len(missing):
        raise UserError(
            f"Beam's {runner} did not write {len(missing) - len(finished)} shard(s) in {work.path}. Its workers must "
            "have access to that directory."
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
