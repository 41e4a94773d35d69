"""What a run saves and restores: `utils.CheckpointConfig` and its parts in gin files."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x._runtime.errors import UserError, check_at_least
from t5x.checkpoints import tree
from t5x.checkpoints.best import BestRule
from t5x.checkpoints.t5x_api import SaveBestCheckpointer, transform_to_save
from t5x.checkpoints.transfer import AssignmentMap, RestoreRules
from t5x.configuration.ignored_parameters import log_ignored


@dataclasses.dataclass
class SaveCheckpointConfig:
    """When and how a run saves checkpoints.

    Attributes:
      period: steps between checkpoints; None saves only at the end.
      keep: number of newest checkpoints to keep; None keeps all. A checkpoint that contains a file `PINNED` is always
        kept.
      checkpoint_steps: additional steps to save at.
      dtype: dtype of the stored parameters. `bfloat16` halves their size, but resuming is then no longer exact.
      save_dataset: accepted for T5X's gin files. Every checkpoint includes the position in the data.
      best_metric: also keep the best checkpoints by this metric: `inference_eval/<task>/<metric>`,
        `training_eval/<task>/<metric>` or `train/<metric>`. The best one is recorded in MODEL_DIR/best.json.
      best_mode: `max` if larger values are better, `min` if smaller ones are.
      keep_best: number of best checkpoints to keep.
      keep_without_metric: with `best_metric`, whether to keep checkpoints of steps without an evaluation, as T5X does.
        If False, they are removed by age like all others.
      state_transformation_fns: T5X functions `(state_dict, parameter_infos) -> (state_dict, parameter_infos)` applied
        to the state to save. Names and shapes must not change, so that the run can be resumed. The infos are shapes.
      keep_dataset_checkpoints, checkpointer_cls, checkpoint_manager_cls: accepted for T5X's gin files and ignored,
        except `checkpoints.SaveBestCheckpointer`, which keeps the best `keep` checkpoints and the newest.
      keep_newest, best: derived from the above.
    """

    period: int | None = None
    keep: int | None = None
    checkpoint_steps: Sequence[int] | None = None
    dtype: str = "float32"
    save_dataset: bool = True
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    keep_best: int = 1
    keep_without_metric: bool = True
    state_transformation_fns: Sequence[Callable[..., Any]] = ()
    keep_dataset_checkpoints: int | None = None
    checkpointer_cls: Callable[..., Any] | None = None
    checkpoint_manager_cls: Callable[..., Any] | None = None
    keep_newest: int | None = dataclasses.field(init=False)
    best: BestRule | None = dataclasses.field(init=False)

    def __post_init__(self):
        positive = {name: getattr(self, name) for name in ("period", "keep", "keep_best")}
        check_at_least(1, "utils.SaveCheckpointConfig.", **positive)
        _check_choice(self, "dtype", ("float32", "bfloat16"))
        _check_choice(self, "best_mode", ("max", "min"))
        asked = SaveBestCheckpointer.of(self.checkpointer_cls)
        if asked is not None and self.best_metric is not None:
            raise UserError(
                "utils.SaveCheckpointConfig has both best_metric and checkpointer_cls = "
                "@checkpoints.SaveBestCheckpointer. Set only one of them."
            )
        if self.best_metric is not None:
            self.best = BestRule(self.best_metric, self.best_mode, self.keep_best, self.keep_without_metric)
            self.keep_newest = self.keep
        else:
            self.best = None if asked is None else asked.rule(self.keep)
            self.keep_newest = self.keep if self.best is None or self.keep is None else 1
        if self.best is not None and self.best.mode not in ("max", "min"):
            raise UserError(f"SaveBestCheckpointer.metric_mode is {self.best.mode!r}; it must be 'max' or 'min'.")
        ignored = ["keep_dataset_checkpoints", "checkpoint_manager_cls"]
        ignored += [] if asked is not None else ["checkpointer_cls"]
        log_ignored("utils.SaveCheckpointConfig", {name: getattr(self, name) for name in ignored})

    def tree_to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state (nested dictionaries of arrays) as it is stored: transformed, with parameters of `dtype`.

        Raises:
          UserError: a transformation changed names or shapes.
        """
        result = transform_to_save(state, self.state_transformation_fns)
        if result is not state and (table := tree.difference(state, result)):
            raise UserError(
                "utils.SaveCheckpointConfig.state_transformation_fns change names or shapes, so the run could not "
                f"resume from its own checkpoints (expected: the state, found: their result): {table}\n"
                "Save the state unchanged, and transform the checkpoint when it is restored."
            )
        if self.dtype == "float32":
            return result
        return {**result, "target": jax.tree.map(lambda x: x.astype(self.dtype), result["target"])}


@dataclasses.dataclass
class RestoreCheckpointConfig:
    """Which checkpoint to start from if MODEL_DIR has none of its own, and how to adapt it.

    The rules (`strict` to `state_transformation_fns`) work on names with unrolled layers, however the network and the
    checkpoint store them. They apply to this checkpoint; a run resumed from MODEL_DIR does not need them.

    Attributes:
      path: a checkpoint of any format, or a MODEL_DIR; a list of them for evaluation; None for training from scratch.
      mode: `specific`: `path` is a checkpoint; `latest`: use the newest complete checkpoint in the directory `path`;
        `all`: use every checkpoint in it, for evaluation.
      dtype: dtype of the parameters in memory; training holds them in float32.
      optimizer_state: `keep` restores it if the checkpoint has all of it; `reset` initializes it.
      step: `keep` continues from the checkpoint's step; `reset` starts at 0.
      strict: False ignores parameters of the checkpoint that the model lacks.
      assignment_map: pairs (pattern for the model's name, the checkpoint's name or None), see `transfer.AssignmentMap`.
      fallback_to_scratch: True leaves what the checkpoint lacks at its initial value.
      state_transformation_fns: T5X functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`, called
        in order after `assignment_map`. The state is nested dictionaries {"target": …, "state": {"step": …,
        "param_states": …}}; `np.asarray(leaf)` reads a leaf. They are also called on resuming, with is_resuming=True.
      restore_dataset: also continue at the data position of the checkpoint, if it is one of ours.
      checkpointer_cls, checkpoint_manager_cls, use_gda: accepted for T5X's gin files and ignored.
    """

    path: str | Sequence[str] | None
    mode: Literal["specific", "latest", "all"] = "latest"
    dtype: DTypeLike | None = None
    optimizer_state: Literal["keep", "reset"] = "keep"
    step: Literal["keep", "reset"] = "keep"
    strict: bool = True
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    fallback_to_scratch: bool = False
    state_transformation_fns: Sequence[Callable[..., Any]] = ()
    restore_dataset: bool = False
    checkpointer_cls: Callable[..., Any] | None = None
    checkpoint_manager_cls: Callable[..., Any] | None = None
    use_gda: bool | None = None

    def __post_init__(self):
        _check_choice(self, "optimizer_state", ("keep", "reset"))
        _check_choice(self, "step", ("keep", "reset"))
        _check_choice(self, "mode", ("specific", "latest", "all"))
        try:
            is_floating = self.dtype is None or jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating)
        except TypeError:
            is_floating = False
        if not is_floating:
            raise UserError(
                f"utils.RestoreCheckpointConfig.dtype is {self.dtype!r}; it must be 'float32', 'bfloat16', 'float16' "
                "or None."
            )
        AssignmentMap(self.assignment_map or ())  # raises UserError
        ignored = ("checkpointer_cls", "checkpoint_manager_cls", "use_gda")
        log_ignored("utils.RestoreCheckpointConfig", {name: getattr(self, name) for name in ignored})

    @property
    def rules(self) -> RestoreRules:
        """How a checkpoint is adapted; projects set `strict` and others after they create the configuration."""
        functions = tuple(self.state_transformation_fns)
        return RestoreRules(AssignmentMap(self.assignment_map or ()), self.strict, self.fallback_to_scratch, functions)

    def single_path(self) -> str:
        """Return the path; raise a UserError if it, or the mode, names several checkpoints."""
        if not isinstance(self.path, str) or self.mode == "all":
            raise UserError(
                "Only one checkpoint is read here: utils.RestoreCheckpointConfig.path must be one path, and mode "
                "'specific' or 'latest'."
            )
        return self.path


@dataclasses.dataclass
class CheckpointConfig:
    """How a run saves and restores; None disables either."""

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None


def _check_choice(config: Any, name: str, choices: Sequence[str]) -> None:
    if (value := getattr(config, name)) not in choices:
        allowed = ", ".join(map(repr, choices))
        raise UserError(f"utils.{type(config).__name__}.{name} is {value!r}; it must be one of {allowed}.")
