"""TensorBoard event files, written in the caller's thread."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from t5x.files.digests import masked_crc32c


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
