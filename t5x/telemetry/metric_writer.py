"""Write the metrics of a run to TensorBoard events and `metrics.jsonl`, side by side in one directory."""

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Protocol

import numpy as np

from t5x.files import atomic
from t5x.files.digests import masked_crc32c
from t5x.telemetry import jsonl


class EventFile:
    """A new TensorBoard event file in an existing directory. OSErrors reach the caller.

    It holds TensorBoard's own messages, framed as TFRecords. Library writers write from a thread that a full disk ends
    silently, after which the program hangs; and tensorboardX imports PyTorch, if installed, which takes seconds.

    Args:
      directory: where TensorBoard looks.
      purge_step: TensorBoard hides what earlier files contain after this step.

    Attributes:
      file: the open file.
    """

    def __init__(self, directory: str, purge_step: int | None = None):
        from tensorboard.compat.proto import event_pb2

        self._Event = event_pb2.Event
        # TensorBoard reads the files of a directory in the order of their names.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        self.file = open(os.path.join(directory, name), "wb")  # noqa: SIM115
        self._write(0, file_version="brain.Event:2")
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(purge_step + 1, session_log=start)  # hides this step and later ones
        self.file.flush()

    def write_scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": number} for name, number in numbers.items()]
        self._write(step, summary={"value": values})

    def write_text(self, step: int, tag: str, text: str) -> None:
        tensor = {"dtype": "DT_STRING", "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [text.encode()]}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        value = {"tag": f"{tag}/text_summary", "metadata": metadata, "tensor": tensor}
        self._write(step, summary={"value": [value]})

    def flush(self) -> None:
        """Return when all that was written is on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def _write(self, step: int, **content: Any) -> None:
        data = self._Event(wall_time=time.time(), step=step, **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        self.file.write(b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, data)))


logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class RunDirectory(Protocol):
    """The directory of the run that contains a writer's files."""

    def renew(self) -> bool:
        """Recreate the directory if it was removed; return False if that is not possible now.

        Raises:
          UserError: another run uses its path.
        """

    def what_to_free(self) -> str:
        """Return a sentence that names what may be deleted if the disk is full."""


class MetricWriter(contextlib.AbstractContextManager):
    """A writer of scalars and strings by step.

    `<directory>/metrics.jsonl` has one object per line, `{"step": 100, "loss": 2.5, …}`, complete when `write_scalars`
    returns; values that are not finite are strings (`"nan"`, `"inf"`, `"-inf"`). `<directory>/events.out.tfevents.*`
    has the same scalars, and the texts, for TensorBoard, complete after `flush`. Files that are removed during the run
    are recreated, with a warning.

        >>> with MetricWriter("run/train", collection="train") as writer:  # doctest: +SKIP
        ...     writer.write_scalars(100, {"loss": 2.5})

    Args:
      directory: created if it does not exist.
      collection: what the metrics describe ("train"), for debug messages.
      purge_step: the step that a run resumes from. Later steps are removed from `metrics.jsonl` and hidden in
        TensorBoard, so that a killed and resumed run leaves the same files as an uninterrupted one. None keeps all.
      home: the run's directory; None: removed files are always recreated.

    Attributes:
      on_recreate: called after removed files were recreated.

    Raises:
      UserError: if a file cannot be written; so do all methods.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        collection: str,
        purge_step: int | None = None,
        home: RunDirectory | None = None,
    ):
        self.directory = os.path.abspath(directory)
        self.collection = collection
        self._home = home
        self.on_recreate: Callable[[], None] = lambda: None
        self._path = os.path.join(self.directory, METRICS_FILE)
        self._removal_logged = False
        self._lock = threading.RLock()  # one thread may write while another flushes
        with self._writing():
            self._open(purge_step)

    def write_scalars(self, step: int, scalars: Mapping[str, Any], *, replace: bool = False) -> None:
        """Write the metrics of a step.

        Args:
          step: the step.
          scalars: {name: number}; NumPy and JAX scalars are allowed.
          replace: drop lines of this step that were written earlier.

        Raises:
          TypeError: if a value is not one number.
        """
        step = int(step)
        numbers = {name: _number(name, value) for name, value in scalars.items()}
        with self._writing():
            self._recreate_if_removed()
            if replace:
                self._lines.close()
                jsonl.keep_records(self._path, lambda record: record["step"] != step)
                self._open_lines()
            self._lines.write(jsonl.encode({"step": step, **numbers}))
            self._events.write_scalars(step, numbers)
        logger.debug("%s step %d: %s", self.collection, step, numbers)

    def write_text(self, step: int, tag: str, text: str) -> None:
        """Write Markdown for TensorBoard's text page."""
        with self._writing():
            self._recreate_if_removed()
            self._events.write_text(int(step), tag, text)

    def flush(self) -> None:
        """Block until everything written is on disk."""
        with self._writing():
            self._recreate_if_removed()
            os.fsync(self._lines.fileno())
            self._events.flush()

    def close(self) -> None:
        """Flush and close; closing twice is allowed."""
        if not self._lines.closed:
            self.flush()
            self._events.close()
            self._lines.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                fix = None
                if self._home is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    fix = f"{self._home.what_to_free()} Then start again with the same command."
                raise jsonl.write_error(self._path, error, fix) from error

    def _open(self, purge_step: int | None = None) -> None:
        atomic.make_directories(self.directory)
        if os.path.exists(self._path):  # drop damaged lines and those after purge_step
            last = float("inf") if purge_step is None else purge_step
            jsonl.replace(self._path, (line for record, line in jsonl.read(self._path) if record["step"] <= last))
        self._open_lines()
        self._events = EventFile(self.directory, purge_step)
        atomic.sync(self.directory)

    def _open_lines(self) -> None:
        # Unbuffered: a line is one write, which a kill cannot lose or truncate.
        self._lines = open(self._path, "ab", buffering=0)  # noqa: SIM115

    def _recreate_if_removed(self) -> None:
        files: tuple[IO[bytes], ...] = (self._lines, self._events.file)
        if not any(map(_is_removed, files)):
            return
        if not self._removal_logged:
            logger.warning("%s was removed during the run, and its content is lost; recreating it", self._path)
            self._removal_logged = True
        try:
            if self._home is not None and not self._home.renew():
                return
            self._open()
        except FileNotFoundError:
            return  # it is still being removed; the next write tries again
        self._removal_logged = False
        for file in files:
            with contextlib.suppress(OSError):
                file.close()
        self.on_recreate()


def _is_removed(file: IO[bytes]) -> bool:
    try:
        here, there = os.fstat(file.fileno()), os.stat(file.name)
    except OSError:
        return True  # also how a network file system reports it
    return here.st_nlink == 0 and not os.path.samestat(here, there)


def _number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":
        raise TypeError(f"The scalar {name!r} must be one number, not {value!r}.")
    return int(array.item()) if array.dtype.kind in "biu" else float(array.astype(np.float64).item())
