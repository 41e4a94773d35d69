"""Caches of tasks: the results of a task's deterministic preprocessors, computed once.

`t5x cache` writes them (see `t5x.data.cache_writer`). Everything that reads a task finds them; none is required:

    T5X_TASK_CACHES/                directories, local or remote, separated by ":"; <cache directory>/tasks unless set;
                                    none if empty
      <task>/<split>/
        info.json                   what the content depends on: `identity`
        shard-00000.array_record    record i is the list of examples made from source example i
        COMPLETED                   records, size and checksum of every shard; without it nothing is read

Batches are bitwise identical with and without a cache. A cache that is incomplete or does not match the task is not
read; a warning reports the difference. Shards of a remote cache are copied into the cache directory first.
"""

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import re
import threading
import urllib.parse
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from t5x._runtime.errors import UserError
from t5x.data import example_encoding
from t5x.data.content_hashes import fingerprint
from t5x.data.data_fingerprint import changed_task, changed_values, describe_features
from t5x.data.pipeline import CacheableTask, count_cacheable, name_of
from t5x.files import cache_directory, local_copies, user_files
from t5x.files.directory import Directory, open_directory
from t5x.files.directory import split as split_path
from t5x.files.remote import is_remote
from t5x.files.untrusted import parse_json
from t5x.telemetry import copy_progress

logger = logging.getLogger(__name__)

Example = dict[str, Any]

FORMAT = 2  # 1: the hashes of code were of bytecode
INFO, COMPLETED = "info.json", "COMPLETED"
_MAX_OPEN_SHARDS = 512
_BUFFER = 1 << 16  # bytes read at once; an example is small
_MAX_DIFFERENCES = 5
_reading = threading.Lock()


def directories() -> list[str]:
    """Return the directories to search for caches, in order."""
    named = os.environ.get("T5X_TASK_CACHES")
    if named is None:
        return [] if is_remote(cache_directory.root()) else [cache_directory.place("tasks")]
    return [user_files.absolute_path(directory) for directory in re.split(":(?!//)", named) if directory]


def place(directory: str, task: str, split: str) -> str:
    """Return the directory of the cache of a split."""
    return os.path.join(
        directory, *(urllib.parse.quote(name, safe=":+@,=").replace("..", "%2E.") for name in (task, split))
    )


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.array_record"


def find(task: CacheableTask, split: str, *, need_text: bool = True) -> "CachedExamples | None":
    """Return the cache of a split if there is a valid one.

    Args:
      need_text: ignore caches without texts.
    """
    for path in (place(directory, task.name, split) for directory in directories()):
        parent, name = split_path(path)
        if not parent.is_directory(name):
            continue
        try:
            cached = CachedExamples(path)
            cached.check(task, split)
            cached.stage()
        except Unusable as error:
            _warn_once(f"Ignoring the cache {path}: {error}. Task {task.name!r} is read from its source.")
            continue
        if need_text and cached.info.get("drop_text", True):
            _warn_once(f"Ignoring the cache {path} here: it has no texts (--drop_text), which are needed.")
            continue
        logger.info("Reading split %r of task %r from its cache %s", split, task.name, path)
        if cached.bad:
            _warn_once(
                f"The cache {path} was written with --skip_bad_examples: {cached.bad} bad example(s) of split "
                f"{split!r} of task {task.name!r} are not in it."
            )
        return cached
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


class Unusable(Exception):
    """Why a cache cannot be used."""


class CachedExamples:
    """The examples in the cache of a split.

    Args:
      path: its directory, local or remote; raises Unusable if it is not complete.

    Attributes:
      steps: number of the task's preprocessors that have been applied.
      num_examples: number of source examples.
      bad: number of source examples that were skipped when the cache was written.
      info: content of info.json.
    """

    def __init__(self, path: str):
        self.path = path
        files = open_directory(path)
        info = read_json(files, INFO)
        if info is None:
            raise Unusable(f"it has no {INFO}")
        if info.get("format") != FORMAT:
            raise Unusable(
                f"its format is {info.get('format')}; this version of t5x reads {FORMAT} (`t5x cache --overwrite` "
                "rewrites it)"
            )
        self.info = info
        completed = read_json(files, COMPLETED)
        if completed is None:
            raise Unusable("it is not complete (`t5x cache` resumes)")
        with well_formed(INFO):
            self._per_shard = count_in(self.info, "examples_per_shard", low=1)
            self.num_examples = count_in(self.info, "num_examples")
            self.steps = len(self.info["identity"]["preprocessors"])
        with well_formed(COMPLETED):
            self._sizes = [count_in(shard, "bytes") for shard in completed["shards"]]
            self.bad = sum(count_in(shard, "bad") for shard in completed["shards"])
            there = [count_in(shard, "records") for shard in completed["shards"]]
            if there != list(map(len, shard_ranges(self.num_examples, self._per_shard))):
                raise ValueError(f"its shards do not contain the {self.num_examples} examples of {INFO}")
        self._shards = list(map(shard_name, range(len(self._sizes))))
        if missing := sorted({*self._shards} - files.names()):
            raise Unusable(f"{missing[0]} is missing (`t5x cache` rewrites it)")

    def stage(self) -> None:
        """Make the shards local, so that they can be read; raise Unusable if one has another size."""
        copies = local_copies.stage([os.path.join(self.path, name) for name in self._shards], copy_progress)
        for copy, size in zip(copies, self._sizes, strict=True):
            if (there := os.path.getsize(copy.path)) != size:
                name = os.path.basename(copy.name)
                raise Unusable(f"{name} has {there} bytes instead of {size} (`t5x cache` rewrites it)")
        self._shards = [copy.path for copy in copies]

    def check(self, task: CacheableTask, split: str) -> None:
        """Raise Unusable if the cache does not match the task."""
        written = self.info["identity"]
        steps = count_cacheable(task.preprocessors)
        try:
            now = identity(task, split, steps)
        except UserError as error:
            now = identity(task, split, steps, source=written["source"])
            _warn_once(f"Using the cache {self.path} unchecked: its source cannot be read here: {error}")
        with well_formed(INFO):
            differences = describe_differences(written, now)
        if differences:
            raise Unusable("; ".join(differences))

    def examples(self, index: int) -> list[Example]:
        """Return the examples made from source example `index`."""
        number, record = divmod(index, self._per_shard)
        path = self._shards[number]
        try:
            with _reading:
                (content,) = _open_shard(path, self._sizes[number]).read([record])
            return example_encoding.decode(content)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{path} is damaged or missing (record {record}: {str(error).splitlines()[0]}). Run `t5x cache`, which "
                "rewrites damaged shards, or set T5X_TASK_CACHES= (empty) to read the task from its source."
            ) from error


@functools.lru_cache(_MAX_OPEN_SHARDS)
def _open_shard(path: str, size: int) -> Any:
    from array_record.python import array_record_module

    if os.path.getsize(path) != size:
        raise ValueError("its size has changed")
    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(path, options, file_reader_buffer_size=_BUFFER)


def shard_ranges(num_examples: int, per_shard: int) -> list[range]:
    """Return the source examples of each shard.

    >>> shard_ranges(50, 20)
    [range(0, 20), range(20, 40), range(40, 50)]
    """
    return [range(start, min(start + per_shard, num_examples)) for start in range(0, num_examples, per_shard)]


def read_json(directory: Directory, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if there is no file. Raise Unusable for any other content."""
    try:
        content = directory.read_bytes(name)
    except OSError as error:
        raise Unusable(f"{name} cannot be read: {error.strerror}") from error
    if content is None:
        return None
    with well_formed(name):
        parsed = parse_json(content)
        if not isinstance(parsed, dict):
            raise ValueError(f"it contains a {type(parsed).__name__}, not an object")
        return parsed


@contextlib.contextmanager
def well_formed(name: str) -> Iterator[None]:
    """Raise Unusable, with the name of the file, if its content does not have the expected form."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise Unusable(f"{name} is damaged: {what} (`t5x cache` rewrites it)") from error


def count_in(content: Mapping[str, Any], name: str, low: int = 0) -> int:
    """Return the entry `name`; raise a ValueError unless it is a whole number of at least `low`."""
    value = content[name]
    if type(value) is not int or value < low:
        raise ValueError(f"{name!r} is {value!r}")
    return value


# --- Identity of a cache ----------------------------------------------------------------------------------------------


_preprocessors: weakref.WeakKeyDictionary[CacheableTask, list[dict[str, str]]] = weakref.WeakKeyDictionary()


def identity(task: CacheableTask, split: str, steps: int, source: Any = None) -> dict[str, Any]:
    """Return what the content of a cache depends on, as JSON values.

    Args:
      source: replaces the fingerprint of the task's source.
    """
    if task not in _preprocessors:  # before their first run: some store results in themselves
        _preprocessors[task] = [
            {"name": name_of(step), "hash": fingerprint(step)} for step in task.preprocessors[:steps]
        ]
    described = {
        "source": task.source.fingerprint(split) if source is None else source,
        "features": describe_features(task.output_features, lambda used: fingerprint((used, type(used).encode))),
        "preprocessors": _preprocessors[task],
        "versions": {"sentencepiece": importlib.metadata.version("sentencepiece")},
    }
    return json.loads(json.dumps(described))


def describe_differences(written: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return short descriptions of what has changed since a cache was written."""
    changes = list(changed_values("the version of", written["versions"], now["versions"]))
    changes += changed_task(written, now)
    return changes if len(changes) <= _MAX_DIFFERENCES else [*changes[:_MAX_DIFFERENCES], "and more"]
