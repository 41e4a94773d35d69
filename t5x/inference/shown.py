"""Progress of inference with its rate, shown by the process that writes."""

import time

from t5x.partitioning import distributed
from t5x.telemetry import Progress


class Shown:
    """Progress display of the number of finished examples; see `Progress`.

    Args:
      total: number of examples; None if unknown.
      initial: number of examples finished before.
      unit: name of what is counted.
      quiet: show nothing.
    """

    def __init__(self, total: int | None, initial: int, unit: str, description: str, *, quiet: bool = False):
        self.done = self._initial = initial
        self._unit = unit
        self._began = time.monotonic()
        self._progress = None
        if not quiet and distributed.is_leader():
            self._progress = Progress(total, initial, unit=unit, description=description)

    def update(self, done: int) -> None:
        self.done = done
        if self._progress is not None:
            rate = (done - self._initial) / max(time.monotonic() - self._began, 1e-9)
            self._progress.update(done, **{f"{self._unit}s/s": rate})

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.close()
