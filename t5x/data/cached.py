"""Caches of tasks: what source examples become by the deterministic preprocessors of a task, made once, found again.

`t5x cache` writes them (see `t5x.data.cache`), everything that reads a task finds them by itself and needs none:

    T5X_TASK_CACHES/                directories, parted by ":"; <cache directory>/tasks unless set; none if empty
      <task>/<split>/
        info.json                   what it is a cache of: `identity`
        shard-00000.array_record    record i is the list of examples that source example i became
        COMPLETED                   number of records, size and checksum of every shard; without it nothing is read

Batches are the same with and without a cache, bit for bit. One that is of another state of the task, or is not whole,
is not read; a warning says what differs.
"""

import collections
import importlib.metadata
import json
import logging
import os
import sys
import threading
import urllib.parse
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t5x import cache_directory, startup
from t5x.data import records
from t5x.data.fingerprints import fingerprint
from t5x.data.pipeline import count_cacheable, name_of
from t5x.errors import UserError
from t5x.urls import is_remote

if TYPE_CHECKING:
    from t5x.data.tasks import Task

logger = logging.getLogger(__name__)

Example = dict[str, Any]

FORMAT = 1
INFO, COMPLETED = "info.json", "COMPLETED"
_MAX_OPEN_SHARDS = 512
_BUFFER = 1 << 16  # bytes read at once; an example is small
_told: set[str] = set()


def directories() -> list[str]:
    """Where caches are looked for, the first one first."""
    named = os.environ.get("T5X_TASK_CACHES")
    if named is None:
        return [] if is_remote(startup.cache_directory()) else [cache_directory.place("tasks")]
    if "://" in named:
        local_directory(named, "T5X_TASK_CACHES")
    return [local_directory(directory, "T5X_TASK_CACHES") for directory in named.split(os.pathsep) if directory]


def local_directory(path: str, name: str) -> str:
    """The absolute path of a directory of caches, which `name` gives; a UserError for a remote one."""
    if is_remote(path):
        raise UserError(f"{name}: caches are read from local files; {path} is remote. Name a local directory.")
    return os.path.abspath(os.path.expanduser(path))


def place(directory: str, task: str, split: str) -> str:
    """The directory of the cache of a split."""
    return os.path.join(
        directory, *(urllib.parse.quote(name, safe=":+@,=").replace("..", "%2E.") for name in (task, split))
    )


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.array_record"


def find(task: "Task", split: str, *, need_text: bool = True) -> "CachedExamples | None":
    """The cache of a split, if there is a valid one.

    Args:
      need_text: do not take one whose texts were dropped.
    """
    for path in (place(directory, task.name, split) for directory in directories()):
        if not os.path.isdir(path):
            continue
        try:
            found = CachedExamples(path)
            found.check(task, split)
        except Unusable as error:
            _tell(f"The cache {path} is not used: {error}. Task {task.name!r} is read from its source.")
            continue
        if need_text and found.info["drop_text"]:
            _tell(f"The cache {path} is not used here: its texts were dropped (--drop_text), and they are needed.")
            continue
        logger.info("Split %r of task %r is read from its cache %s", split, task.name, path)
        if found.bad:
            _tell(
                f"The cache {path} was written with --skip_bad_examples: {found.bad} bad example(s) of split {split!r} "
                f"of task {task.name!r} are not in it."
            )
        return found
    return None


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        logger.warning("%s", message)


class Unusable(Exception):
    """Why a cache cannot be used."""


class CachedExamples:
    """The examples in the cache of a split.

    Args:
      path: its directory; Unusable if it is not whole.

    Attributes:
      steps: how many preprocessors of the task have been applied.
      num_examples: of the source.
      bad: source examples that were passed over when it was written.
      info: content of info.json.
    """

    def __init__(self, path: str):
        self.path = path
        self.info = read_json(os.path.join(path, INFO))
        if self.info is None:
            raise Unusable(f"it has no {INFO}")
        if self.info.get("format") != FORMAT:
            raise Unusable(f"it has the format {self.info.get('format')}, and this version reads {FORMAT}")
        completed = read_json(os.path.join(path, COMPLETED))
        if completed is None:
            raise Unusable("it is not complete (`t5x cache` goes on where it stopped)")
        self._sizes = [shard["bytes"] for shard in completed["shards"]]
        self.bad = sum(shard["bad"] for shard in completed["shards"])
        self._per_shard = self.info["examples_per_shard"]
        self.steps = len(self.info["identity"]["preprocessors"])
        self.num_examples = self.info["num_examples"]
        for number, size in enumerate(self._sizes):
            file = os.path.join(path, shard_name(number))
            there = os.path.getsize(file) if os.path.exists(file) else None
            if there != size:
                state = "is missing" if there is None else f"has {there} bytes instead of {size}"
                raise Unusable(f"{shard_name(number)} {state} (`t5x cache` makes it again)")

    def check(self, task: "Task", split: str) -> None:
        """Unusable if it is of another state of the task."""
        written = self.info["identity"]
        steps = count_cacheable(task.preprocessors)
        try:
            now = identity(task, split, steps)
        except UserError as error:
            now = identity(task, split, steps, source=written["source"])
            _tell(f"The cache {self.path} is used, though its source cannot be read here to compare it: {error}")
        if differences := describe_differences(written, now):
            raise Unusable("; ".join(differences))

    def examples(self, index: int) -> list[Example]:
        """What source example `index` became."""
        number, record = divmod(index, self._per_shard)
        path = os.path.join(self.path, shard_name(number))
        try:
            return records.decode(_open_shards.read(path, record, self._sizes[number]))
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{path} is damaged or gone (record {record}: {str(error).splitlines()[0]}). `t5x cache` makes the "
                "damaged shards again; with T5X_TASK_CACHES= (empty) the task is read from its source."
            ) from error


class _OpenShards:
    """The shards that this process has open, those used last."""

    def __init__(self, limit: int):
        self._readers: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._limit = limit
        self._lock = threading.Lock()

    def read(self, path: str, record: int, size: int) -> bytes:
        with self._lock:
            reader = self._readers.get(path)
            if reader is None:
                self._readers[path] = reader = self._open(path, size)
                if len(self._readers) > self._limit:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(path)
            return reader.read([record])[0]

    @staticmethod
    def _open(path: str, size: int) -> Any:
        from array_record.python import array_record_module

        if os.path.getsize(path) != size:
            raise ValueError("its size has changed")
        options = "readahead_buffer_size:0,max_parallelism:0"
        return array_record_module.ArrayRecordReader(path, options, file_reader_buffer_size=_BUFFER)


_open_shards = _OpenShards(_MAX_OPEN_SHARDS)


def read_json(path: str) -> Any:
    """The content of a JSON file; None where there is none."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Unusable(f"{os.path.basename(path)} is damaged ({error})") from error


# --- What a cache is of -----------------------------------------------------------------------------------------------


_preprocessors: weakref.WeakKeyDictionary["Task", list[dict[str, str]]] = weakref.WeakKeyDictionary()


def identity(task: "Task", split: str, steps: int, source: Any = None) -> dict[str, Any]:
    """What the content of a cache depends on, as JSON holds it.

    Args:
      source: taken for that of the task's source.
    """
    if task not in _preprocessors:  # as they are before they are first run: some keep what they have worked out
        _preprocessors[task] = [
            {"name": name_of(step), "hash": fingerprint(step)} for step in task.preprocessors[:steps]
        ]
    described = {
        "source": task.source.fingerprint(split) if source is None else source,
        "features": {
            name: {
                "vocabulary": repr(feature.vocabulary),
                "hash": fingerprint((feature.vocabulary, type(feature.vocabulary).encode)),
                "add_eos": feature.add_eos,
                "dtype": feature.dtype,
                "rank": feature.rank,
            }
            for name, feature in task.output_features.items()
        },
        "preprocessors": _preprocessors[task],
        "versions": _versions(),
    }
    return json.loads(json.dumps(described))


def _versions() -> dict[str, str]:
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",  # hashes are of bytecode
        "sentencepiece": importlib.metadata.version("sentencepiece"),
    }


def describe_differences(written: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed since a cache was written, each in a few words."""
    found = []
    for name in written["versions"] | now["versions"]:
        if written["versions"].get(name) != now["versions"].get(name):
            found.append(f"{name} was {written['versions'].get(name)} and is {now['versions'].get(name)}")
    if found:  # hashes of code say nothing then
        return found
    before, after = written["preprocessors"], now["preprocessors"]
    if [step["name"] for step in before] != [step["name"] for step in after]:
        names = [", ".join(step["name"] for step in steps) or "none" for steps in (before, after)]
        found.append(f"its preprocessors were {names[0]} and are {names[1]}")
    else:
        changed = [step["name"] for step, other in zip(before, after, strict=True) if step != other]
        found += [f"the preprocessor {name}, its arguments or what it calls has changed" for name in changed]
    for name in written["features"] | now["features"]:
        one, other = written["features"].get(name), now["features"].get(name)
        if one is None or other is None:
            found.append(f"the feature {name!r} {'is new' if one is None else 'is gone'}")
        elif one["hash"] != other["hash"]:
            found.append(
                f"the vocabulary of {name!r} was {one['vocabulary']} and is {other['vocabulary']}, or has changed"
            )
        else:
            keys = [key for key in ("add_eos", "dtype", "rank") if one[key] != other[key]]
            found += [f"{key} of the feature {name!r} was {one[key]} and is {other[key]}" for key in keys]
    return found + _source_differences(written["source"], now["source"])


def _source_differences(before: Any, after: Any) -> list[str]:
    if before == after:
        return []
    one, other = ({name: version for name, version in of.get("files", ())} for of in (before, after))
    if changed := [name for name in one | other if one.get(name) != other.get(name)]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return [f"the source's files have changed ({', '.join(changed[:3])}{more})"]
    return [f"the source {before.get('class')}, its code or its arguments have changed"]
