"""Where the figures of a run go: TensorBoard events and `metrics.jsonl`, side by side in one directory."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Protocol

import numpy as np

from t5x.telemetry import jsonl
from t5x.telemetry.events import EventFile

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Home(Protocol):
    """The directory of the run that a writer's files lie in."""

    def renew(self) -> bool:
        """Makes it ours again where somebody has removed it; raises where another run has it. False: not now."""

    def what_to_free(self) -> str:
        """What of it may be deleted where the disk is full."""


class MetricWriter:
    """Writes scalars and texts by step.

    `<directory>/metrics.jsonl` has one object a line, `{"step": 100, "loss": 2.5, …}`, complete as soon as
    `write_scalars` returns; values that are not finite are strings there (`"nan"`, `"inf"`, `"-inf"`). TensorBoard
    finds the same scalars, and the texts, in `<directory>/events.out.tfevents.*`, complete after `flush`. Files that
    somebody removes meanwhile are begun anew, with a warning.

        >>> with MetricWriter("run/train", collection="train") as writer:  # doctest: +SKIP
        ...     writer.write_scalars(100, {"loss": 2.5})

    Args:
      directory: created where it does not exist.
      collection: what the figures are about ("train"); it opens the debug log line of each step.
      purge_step: the step that a run resumes from. What was written of later steps is removed from `metrics.jsonl`
        and hidden by TensorBoard, so that a killed and resumed run leaves what an undisturbed one does. None keeps
        everything that is there.
      home: None: what to free is not known, and files that are removed are begun anew in any case.

    Attributes:
      when_begun_anew: called after files that were removed have been begun anew.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        collection: str,
        purge_step: int | None = None,
        home: Home | None = None,
    ):
        self.directory = os.path.abspath(directory)
        self.collection = collection
        self._home = home
        self.when_begun_anew: Callable[[], None] = lambda: None
        self._path = os.path.join(self.directory, METRICS_FILE)
        self._loss_told = False
        self._lock = threading.RLock()  # one thread may write while another flushes
        with self._writing():
            self._open(purge_step)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes figures of a step.

        Args:
          step: the step they belong to.
          scalars: {name: number}; numpy and JAX scalars count as numbers.
        """
        step = int(step)
        numbers = {name: _number(name, value) for name, value in scalars.items()}
        with self._writing():
            self._begin_anew_if_removed()
            self._lines.write(jsonl.encode({"step": step, **numbers}))
            self._events.write_scalars(step, numbers)
        logger.debug("%s step %d: %s", self.collection, step, numbers)

    def write_text(self, step: int, tag: str, text: str) -> None:
        """Writes a text, in Markdown, for TensorBoard's text page."""
        with self._writing():
            self._begin_anew_if_removed()
            self._events.write_text(int(step), tag, text)

    def flush(self) -> None:
        """Returns when all that was written is on disk."""
        with self._writing():
            self._begin_anew_if_removed()
            os.fsync(self._lines.fileno())
            self._events.flush()

    def close(self) -> None:
        """Flushes and closes; a second time does nothing."""
        if not self._lines.closed:
            self.flush()
            self._events.close()
            self._lines.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                mend = None
                if self._home is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    mend = f"{self._home.what_to_free()} Then start again with the same command."
                raise jsonl.write_error(self._path, error, mend) from error

    def _open(self, purge_step: int | None = None) -> None:
        os.makedirs(self.directory, exist_ok=True)
        self._purge(purge_step)
        # Unbuffered: a line is one write, which a kill cannot lose or cut.
        self._lines = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._events = EventFile(self.directory, purge_step)

    def _begin_anew_if_removed(self) -> None:
        files = (self._lines, self._events.file)
        if not any(map(_is_removed, files)):
            return
        if not self._loss_told:
            logger.warning("%s has been removed during the run, with what was in it: it is begun anew", self._path)
            self._loss_told = True
        try:
            if self._home is not None and not self._home.renew():
                return
            self._open()
        except FileNotFoundError:
            return  # it is still being removed; the next write tries again
        self._loss_told = False
        for file in files:
            with contextlib.suppress(OSError):
                file.close()
        self.when_begun_anew()

    def _purge(self, purge_step: int | None) -> None:
        """Drops damaged lines, and those of steps after `purge_step`."""
        if not os.path.exists(self._path):
            return
        last = float("inf") if purge_step is None else purge_step
        jsonl.replace(self._path, (line for record, line in jsonl.read(self._path) if record["step"] <= last))


def _is_removed(file: IO[bytes]) -> bool:
    try:
        here, there = os.fstat(file.fileno()), os.stat(file.name)
    except OSError:
        return True  # also on a network's disk, which tells it so
    return here.st_nlink == 0 and not os.path.samestat(here, there)


def _number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":
        raise TypeError(f"The scalar {name!r} must be one number, not {value!r}.")
    return int(array.item()) if array.dtype.kind in "biu" else float(array.astype(np.float64).item())
