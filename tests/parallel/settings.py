"""The ways in which one run is computed, and who goes on from whose checkpoint."""

import dataclasses
import itertools
import random

DEVICES = 8
HALF, STEPS = 10, 20


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to compute the run.

    Attributes:
      preset: of the partitioner; None is its default.
      scanned: whether the layers are stacked.
      microbatches: parts of a batch.
      processes: that share the devices.
      devices: of all processes together, virtual ones.
    """

    preset: str | None
    scanned: bool
    microbatches: int
    processes: int
    devices: int = DEVICES

    def __str__(self) -> str:
        layers = "scanned" if self.scanned else "unrolled"
        return f"{self.preset or 'one device'} {layers} {self.microbatches}mb {self.processes}p"


REFERENCE = Setting(preset=None, scanned=False, microbatches=1, processes=1, devices=1)

ALL = [Setting(*each) for each in itertools.product(("dp", "fsdp", "tp", "2d"), (False, True), (1, 2, 4), (1, 2, 4))]

# SOME: every preset, layout and number of microbatches saves and loads; four processes save, two load. Starting and
# compiling cost most, and every process does both: few settings, most of them in one process, in many pairings.
_DP, _FSDP, _TP = Setting("dp", False, 2, 1), Setting("fsdp", False, 1, 1), Setting("tp", True, 4, 1)
_TWO, _FOUR = Setting("2d", True, 2, 2), Setting("2d", True, 1, 4)
SOME = [
    (_DP, _TP), (_FSDP, _DP), (_FSDP, _TWO), (_TP, _FSDP), (_FOUR, _DP), (_FOUR, _TP),
]  # fmt: skip


def pairings(cycle: list[Setting]) -> list[tuple[Setting, Setting]]:
    """(who trains the first half, who goes on), each setting once as either."""
    return list(zip(cycle, cycle[1:] + cycle[:1], strict=True))


def shuffled(seed: int) -> list[Setting]:
    """All settings in a random order."""
    return random.Random(seed).sample(ALL, len(ALL))
