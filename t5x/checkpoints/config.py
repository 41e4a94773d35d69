"""What is saved and what is restored: `utils.CheckpointConfig` and its parts in gin files."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from t5x.errors import UserError


@dataclasses.dataclass
class SaveCheckpointConfig:
    """When and how a run saves.

    Attributes:
      period: steps between checkpoints; None saves only at the end.
      keep: how many of the newest stay; None keeps all. A checkpoint with a file `PINNED` in it stays always.
      checkpoint_steps: further steps to save at.
      dtype: of the stored parameters. `bfloat16` halves them, but a run resumed from them is no longer exact.
      save_dataset: kept for T5X's gin files. The position in the data is in every checkpoint, whatever it says.
    """

    period: int | None = None
    keep: int | None = None
    checkpoint_steps: Sequence[int] | None = None
    dtype: str = "float32"
    save_dataset: bool = True

    def __post_init__(self):
        if self.period is not None and self.period < 1:
            raise UserError(f"utils.SaveCheckpointConfig.period is {self.period}: it must be at least 1, or None.")
        if self.keep is not None and self.keep < 1:
            raise UserError(f"utils.SaveCheckpointConfig.keep is {self.keep}: it must be at least 1, or None for all.")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"utils.SaveCheckpointConfig.dtype is {self.dtype!r}: it must be 'float32' or 'bfloat16'.")


@dataclasses.dataclass
class RestoreCheckpointConfig:
    """Which checkpoint to start from, where MODEL_DIR has none of its own.

    Attributes:
      path: a checkpoint, or a MODEL_DIR.
      mode: `specific`: `path` is a checkpoint; `latest`: `path` is a directory of them and the newest whole one is
        taken; `all`: each of them, for evaluation.
      dtype: of the parameters in memory; training holds them in float32.
      optimizer_state: `keep` takes it over where the checkpoint has all of it; `reset` starts it anew.
      step: `keep` goes on counting from the checkpoint's; `reset` starts at 0.
    """

    path: str | Sequence[str]
    mode: Literal["specific", "latest", "all"] = "latest"
    dtype: Any = None
    optimizer_state: Literal["keep", "reset"] = "keep"
    step: Literal["keep", "reset"] = "keep"

    def __post_init__(self):
        for name in ("optimizer_state", "step"):
            if getattr(self, name) not in ("keep", "reset"):
                raise UserError(
                    f"utils.RestoreCheckpointConfig.{name} must be 'keep' or 'reset', not {getattr(self, name)!r}."
                )
        if self.mode not in ("specific", "latest", "all"):
            raise UserError(
                f"utils.RestoreCheckpointConfig.mode is {self.mode!r}: it must be 'specific', 'latest' or 'all'."
            )


@dataclasses.dataclass
class CheckpointConfig:
    """Saving and restoring of a run; None leaves either out."""

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None
