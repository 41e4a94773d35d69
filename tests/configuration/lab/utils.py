import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal


class Mode(enum.Enum):
    SPECIFIC = "specific"
    LATEST = "latest"


@dataclasses.dataclass
class DatasetConfig:
    mixture_or_task_name: str
    task_feature_lengths: Mapping[str, int] | None
    split: str
    batch_size: int
    shuffle: bool = True
    seed: int | None = None
    module: str | None = None


@dataclasses.dataclass
class RestoreConfig:
    path: str | Sequence[str]
    mode: Literal["specific", "latest"] = "latest"
    how: Mode = Mode.LATEST
    dtype: Any = "float32"
    mesh: tuple[int, int] | None = None
    steps: Sequence[int] = ()
    rename: Mapping[str, str] | None = None


def schedule(base_learning_rate: float = 0.5, warmup_steps: int = 10000, factors: str = "constant"):
    return lambda step: base_learning_rate


def untyped(flag=True, number=3, word="x", nothing=None):
    return flag, number, word, nothing
