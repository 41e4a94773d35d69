"""Results on disk, chunk by chunk: whatever ends a run, what was finished stays, and the next one goes on behind it.

A chunk is written beside its place, synced and renamed, then its `.COMPLETED` marker is; so is the whole when the
chunks are merged. The directory also keeps what the results depend on, and a lock. Names of chunks are T5X's:

    tmp-<name>/<name>-chunk00000, <name>-chunk00000.COMPLETED, …

`merged` in it says that the whole is there: nothing but the removal of the directory is left to do.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from t5x.errors import UserError
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

COMPLETED = ".COMPLETED"
JOB_FILE = "job.json"
_LOCK_FILE = ".lock"
_MERGED_FILE = "merged"


class Chunks:
    """The chunks of one output.

    Args:
      directory: of the chunks, made where it is not there yet. Only its parent must exist.
      name: of the output.
      job: what the results depend on, as JSON. Chunks of another job are refused.
      start_anew: chunks of another job are discarded instead, which is said.
      mend: how a user starts anew, for the message.

    Attributes:
      finished: the records of the chunks that are whole, from the first on without a gap.
      merged: they have been put together.
    """

    def __init__(
        self, directory: str, name: str, job: Mapping[str, Any], *, start_anew: bool = False, mend: str = "remove it"
    ):
        self.directory = directory
        self._name = name
        self._lock: int | None = None
        try:
            os.makedirs(directory, exist_ok=True)
            self._take_lock()
            self._same_job(json.loads(json.dumps(job)), start_anew, mend)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise jsonl.write_error(directory, error) from error
            raise
        told = _read_json(os.path.join(directory, _MERGED_FILE))
        self.merged = told is not None
        self.finished = told["finished"] if self.merged else list(self._read_finished())

    def path(self, index: int) -> str:
        """Where chunk `index` is."""
        return os.path.join(self.directory, f"{self._name}-chunk{index:05}")

    def write(self, write: Callable[[str], None], record: Mapping[str, Any]) -> None:
        """The next chunk.

        Args:
          write: writes the file whose path it is given.
          record: what a later run needs to know of this chunk.
        """
        path = self.path(len(self.finished))
        size = None
        with jsonl.whole_or_nothing(path) as temporary:
            write(temporary)
            if os.path.exists(temporary):  # a writer of the user's own may write elsewhere
                size = os.path.getsize(temporary)
        record = {**record, "size": size}
        jsonl.replace(path + COMPLETED, [json.dumps(record).encode() + b"\n"])
        self.finished.append(record)

    def merge(self, path: str) -> None:
        """Puts the chunks together, at `path`, unless that has been done."""
        if not self.merged:
            if not self._is_whole(path):
                merge(path, [self.path(index) for index in range(len(self.finished))])
            content = json.dumps({"finished": self.finished}).encode()
            jsonl.replace(os.path.join(self.directory, _MERGED_FILE), [content + b"\n"])
            self.merged = True

    def discard(self, first: int) -> None:
        """Chunk `first` and all behind it: they are no longer finished."""
        if self.merged:
            os.unlink(os.path.join(self.directory, _MERGED_FILE))
            self.merged = False
        for index in range(first, len(self.finished)):
            for path in (self.path(index) + COMPLETED, self.path(index)):
                if os.path.exists(path):
                    os.unlink(path)
        del self.finished[first:]

    def remove(self) -> None:
        """Everything, once it is merged. What says that it is goes last."""
        for name in self._ours():
            if name != _MERGED_FILE:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.directory, name))
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Lets another run in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = os.open(os.path.join(self.directory, _LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            raise UserError(
                f"Another process is writing {self._name} (it holds {self.directory}). Wait for it, or choose another "
                "output."
            ) from error

    def _same_job(self, job: dict[str, Any], start_anew: bool, mend: str) -> None:
        path = os.path.join(self.directory, JOB_FILE)
        there = _read_json(path)
        if there == job:
            return
        chunks = self._ours()
        if there is None and chunks and not start_anew:
            raise UserError(
                f"{self.directory} holds chunks, but {JOB_FILE}, which says of what, cannot be read. To start anew, "
                f"{mend}."
            )
        if there is not None and chunks:
            names = [name for name in sorted({*there, *job}) if there.get(name) != job.get(name)]
            told = "; ".join(f"{name} was {_short(there.get(name))}, is {_short(job.get(name))}" for name in names)
            if not start_anew:
                raise UserError(
                    f"{self.directory} holds the finished part of a run that differs: {told}. Start with what it had "
                    f"to go on with it; to start anew, {mend}."
                )
            log.warning("%s held the finished part of a run that differs (%s): it is discarded", self.directory, told)
        self._wipe()
        jsonl.replace(path, [json.dumps(job).encode() + b"\n"])

    def claim(self, path: str, *, anew: bool) -> bool:
        """Whether the file there is these chunks put together, perhaps by a run that was ended right after that.

        Args:
          anew: what cannot be checked any more, as its chunks are being removed, is discarded.
        """
        if not self.merged:
            return bool(self.finished) and self._is_whole(path)
        there = os.path.exists(path) and os.path.getsize(path) == sum(record["size"] for record in self.finished)
        if there and (self._all_there() or not anew):
            return True
        os.unlink(os.path.join(self.directory, _MERGED_FILE))
        self.merged = False
        if not self._all_there():
            self._wipe()
        return False

    def _all_there(self) -> bool:
        return all(os.path.exists(self.path(index)) for index in range(len(self.finished)))

    def _wipe(self) -> None:
        for name in self._ours():
            os.unlink(os.path.join(self.directory, name))
        self.finished = []

    def _ours(self) -> list[str]:
        """The files that a run has left, besides its job."""
        prefix = f"{self._name}-chunk"
        return [name for name in os.listdir(self.directory) if name.startswith(prefix) or name == _MERGED_FILE]

    def _is_whole(self, path: str) -> bool:
        sizes = [record["size"] for record in self.finished]
        if not os.path.exists(path) or None in sizes or os.path.getsize(path) != sum(sizes):
            return False
        with open(path, "rb") as whole:
            for index, size in enumerate(sizes):
                with open(self.path(index), "rb") as part:
                    if whole.read(size) != part.read():
                        return False
        return True

    def _read_finished(self) -> Iterator[dict[str, Any]]:
        index = 0
        while (record := _read_json(self.path(index) + COMPLETED)) is not None:
            size = record.get("size")
            if size is not None and (not os.path.exists(self.path(index)) or os.path.getsize(self.path(index)) != size):
                log.warning("%s is not as it was written; it is computed again", self.path(index))
                return
            yield record
            index += 1


def merge(path: str, parts: Iterable[str]) -> None:
    """The files `parts`, one after the other, as one."""
    with jsonl.whole_or_nothing(path) as temporary, open(temporary, "wb") as file:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            read = json.load(file)
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
