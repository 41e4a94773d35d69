"""TensorBoard event files, written in the caller's own thread."""

import os
import time
from collections.abc import Mapping
from typing import Any


class EventFile:
    """A new TensorBoard event file in a directory, which must exist. OSErrors reach the caller.

    tensorboardX encodes it. Its SummaryWriter is not used: it writes from a thread that a full disk ends without a
    word, after which the program waits for ever; and two of them started within a second overwrite each other's file.

    Args:
      directory: where TensorBoard looks.
      purge_step: TensorBoard hides what earlier files have of steps after this one.
    """

    def __init__(self, directory: str, purge_step: int | None = None):
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._text_summary = summary.text
        self._Summary = summary.Summary
        self._Event = event_pb2.Event
        # TensorBoard reads the files of a directory in the order of their names.
        self._writer = EventsWriter(os.path.join(directory, "events"), filename_suffix=f".{time.time_ns()}")
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(purge_step + 1, session_log=start)  # it hides what is at this step or later
        self.flush()

    def write_scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step, summary=self._Summary(value=values))

    def write_text(self, step: int, tag: str, text: str) -> None:
        self._write(step, summary=self._text_summary(tag, text))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._Event(wall_time=time.time(), step=step, **content))
