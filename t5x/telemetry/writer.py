"""Where the figures of a run go: TensorBoard events and `metrics.jsonl`, side by side in one directory."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x.telemetry import jsonl
from t5x.telemetry.events import EventFile

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricWriter:
    """Writes scalars and texts by step.

    `<directory>/metrics.jsonl` has one object a line, `{"step": 100, "loss": 2.5, …}`, complete as soon as
    `write_scalars` returns; values that are not finite are strings there (`"nan"`, `"inf"`, `"-inf"`). TensorBoard
    finds the same scalars, and the texts, in `<directory>/events.out.tfevents.*`, complete after `flush`.

        >>> with MetricWriter("run/train", collection="train") as writer:  # doctest: +SKIP
        ...     writer.write_scalars(100, {"loss": 2.5})

    Args:
      directory: created where it does not exist.
      collection: what the figures are about ("train"); it opens the debug log line of each step.
      purge_step: the step that a run resumes from. What was written of later steps is removed from `metrics.jsonl`
        and hidden by TensorBoard, so that a killed and resumed run leaves what an undisturbed one does. None keeps
        everything that is there.
    """

    def __init__(self, directory: str | os.PathLike[str], *, collection: str, purge_step: int | None = None):
        self.directory = os.fspath(directory)
        self.collection = collection
        self._path = os.path.join(self.directory, METRICS_FILE)
        try:
            os.makedirs(self.directory, exist_ok=True)
            self._purge(purge_step)
            # Unbuffered: a line is one write, which a kill cannot lose or cut.
            self._lines = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._events = EventFile(self.directory, purge_step)
        except OSError as error:
            raise jsonl.write_error(self._path, error) from error

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes figures of a step.

        Args:
          step: the step they belong to.
          scalars: {name: number}; numpy and JAX scalars count as numbers.
        """
        step = int(step)
        numbers = {name: _number(name, value) for name, value in scalars.items()}
        try:
            self._lines.write(jsonl.encode({"step": step, **numbers}))
            self._events.write_scalars(step, numbers)
        except OSError as error:
            raise jsonl.write_error(self._path, error) from error
        logger.debug("%s step %d: %s", self.collection, step, numbers)

    def write_text(self, step: int, tag: str, text: str) -> None:
        """Writes a text, in Markdown, for TensorBoard's text page."""
        try:
            self._events.write_text(int(step), tag, text)
        except OSError as error:
            raise jsonl.write_error(self.directory, error) from error

    def flush(self) -> None:
        """Returns when all that was written is on disk."""
        try:
            os.fsync(self._lines.fileno())
            self._events.flush()
        except OSError as error:
            raise jsonl.write_error(self._path, error) from error

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

    def _purge(self, purge_step: int | None) -> None:
        """Drops damaged lines, and those of steps after `purge_step`."""
        if not os.path.exists(self._path):
            return
        last = float("inf") if purge_step is None else purge_step
        jsonl.replace(self._path, (line for record, line in jsonl.read(self._path) if record["step"] <= last))


def _number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":
        raise TypeError(f"The scalar {name!r} must be one number, not {value!r}.")
    return int(array.item()) if array.dtype.kind in "biu" else float(array.astype(np.float64).item())
