"""Actions, which see the metrics of training or of an evaluation and may end the run.

In gin: `train.actions = {'TRAIN_EVAL': [@trainer.EarlyStoppingAction()]}`.
"""

import abc
import dataclasses
import enum
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x.metrics.accumulators import Scalar
from t5x.partitioning import distributed
from t5x.trainer.train_state import TrainState

log = logging.getLogger(__name__)

MetricsByTask = Mapping[str, Mapping[str, Any]]

TRAIN_TASK = "train"  # the task of training metrics in `metrics_by_task`


class ActionMode(enum.Enum):
    """When an action runs: after a line of training metrics, teacher-forced evaluation, or evaluation by decoding."""

    TRAIN = 1
    TRAIN_EVAL = 2
    INFER_EVAL = 3


class BaseAction(abc.ABC):
    """Base class of actions. A subclass must define `run`.

    Attributes:
      task: the task whose metrics it uses, to check before training that the task is evaluated; None is any.
      reason: why the last `run` returned True, in a few words.
      worth_saving: whether to save when this action ends the run.
    """

    task: str | None = None
    reason: str = ""
    worth_saving: bool = True

    @abc.abstractmethod
    def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
        """Return whether to end the run.

        Args:
          train_state: the current state.
          metrics_by_task: {task: {metric: value}}; training metrics are those of task `train`.
        """

    def state(self) -> dict[str, Any]:
        """Return the state to save with checkpoints; it must be JSON-serializable."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing to restore)
        """Restore what `state` returned."""

    def settings(self) -> dict[str, Any]:
        """Return the settings, for JSON. A run that the action ended resumes once they have changed."""
        return {}

    def __str__(self) -> str:
        return type(self).__name__


class EarlyStoppingAction(BaseAction):
    """Ends the run when a metric has stopped improving.

    Consecutive values among the last `patience` are compared. The run ends if none is better than the one before it by
    more than `atol + rtol * |previous|`. So patience=3 ends the run after two consecutive changes without improvement.
    An equal value is not an improvement, and NaN is worse than any number.

    Args:
      metric: (task, metric), e.g. `('glue_mnli_v002', 'accuracy')`; task `train` in mode TRAIN.
      mode: `min` if lower is better, `max` if higher is better.
      patience: number of values to compare.
      atol, rtol: smaller changes are not improvements.
    """

    def __init__(self, metric: tuple[str, str], mode: str, patience: int = 3, atol: float = 0.0, rtol: float = 0.0):
        where = "trainer.EarlyStoppingAction"
        if isinstance(metric, str) or len(metric) != 2 or not all(isinstance(part, str) for part in metric):
            raise UserError(f"{where}.metric is {metric!r}: it must be ('TASK', 'METRIC').")
        if mode not in ("min", "max"):
            raise UserError(f"{where}.mode is {mode!r}: it must be 'min' or 'max'.")
        if patience < 2:
            raise UserError(f"{where}.patience is {patience}: two values at least are needed to see an improvement.")
        if atol < 0 or rtol < 0:
            raise UserError(f"{where}: atol is {atol} and rtol {rtol}; neither may be negative.")
        self.task, self.metric = metric
        self.mode, self.patience, self.atol, self.rtol = mode, patience, atol, rtol
        self._history: list[tuple[int, float]] = []
        self._restored = False

    def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
        value, step = _metric_of(self, metrics_by_task), int(train_state.step)
        if value is None:
            return False
        if self._restored:  # the run may see the metrics of the checkpoint's step a second time
            self._history = [entry for entry in self._history if entry[0] < step]
            self._restored = False
        self._history = [*self._history, (step, value)][-self.patience :]
        values = [value for _, value in self._history]
        if len(values) < self.patience or any(map(self._improved, values[1:], values)):
            return False
        history = ", ".join(f"{value:.6g} at step {step}" for step, value in self._history)
        verb = "decreased" if self.mode == "min" else "increased"
        terms = [f"{self.atol:g}"] * bool(self.atol) + [f"{self.rtol:g} of the previous value"] * bool(self.rtol)
        least = f" by more than {' + '.join(terms)}" if terms else ""
        self.reason = f"{self.metric} of {self.task} has not {verb}{least} (patience {self.patience}): {history}"
        return True

    def _improved(self, current: float, previous: float) -> bool:
        if math.isnan(current) or math.isnan(previous):
            return math.isnan(previous) and not math.isnan(current)
        least = self.atol + self.rtol * abs(previous) if math.isfinite(previous) else 0.0
        return current < previous - least if self.mode == "min" else current > previous + least

    def state(self) -> dict[str, Any]:
        return {"history": [[step, value if math.isfinite(value) else str(value)] for step, value in self._history]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history = [(step, float(value)) for step, value in state["history"]]
        self._restored = True

    def settings(self) -> dict[str, Any]:
        return {"patience": self.patience, "atol": self.atol, "rtol": self.rtol}

    def __str__(self) -> str:
        return f"EarlyStoppingAction({self.task}, {self.metric}, {self.mode})"


class TerminateOnNanAction(BaseAction):
    """Ends the run when a metric is NaN or infinite. Steps after the last checkpoint are not saved.

    Args:
      task: task of the metric; `train` in mode TRAIN.
      metric: name of the metric.
    """

    worth_saving = False

    def __init__(self, task: str, metric: str = "loss"):
        self.task, self.metric = task, metric

    def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
        value = _metric_of(self, metrics_by_task)
        self.reason = f"{self.metric} of {self.task} is {value}"
        return value is not None and not math.isfinite(value)

    def __str__(self) -> str:
        return f"TerminateOnNanAction({self.task}, {self.metric})"


@dataclasses.dataclass(frozen=True)
class ActionStop:
    """Records that an action ended the run. `str()` describes it in one line.

    Attributes:
      step: the last step.
      action: the action that ended the run.
      reason: why it did.
      worth_saving: whether to save the state.
    """

    step: int
    action: str
    reason: str
    worth_saving: bool

    def __str__(self) -> str:
        return f"{self.action} ends the run after step {self.step}" + (f": {self.reason}" if self.reason else "")


ActionMapType = Mapping[ActionMode, Sequence[BaseAction]]


class Actions:
    """All actions of a run.

    Args:
      actions: {`TRAIN`, `TRAIN_EVAL` or `INFER_EVAL`: actions}; None for no actions.
    """

    def __init__(self, actions: Mapping[str, Sequence[BaseAction]] | ActionMapType | None):
        self._actions: dict[str, list[BaseAction]] = {}
        for mode, listed in (actions or {}).items():
            name = mode.name if isinstance(mode, enum.Enum) else mode
            if name not in ActionMode.__members__:
                raise UserError(f"train.actions has the key {name!r}; use {', '.join(ActionMode.__members__)}.")
            if not isinstance(listed, Sequence) or not all(isinstance(action, BaseAction) for action in listed):
                raise UserError(
                    f"train.actions[{name!r}] is {listed!r}: it must be a list of objects of classes derived from "
                    "trainer.BaseAction, in gin with brackets: [@trainer.TerminateOnNanAction()]."
                )
            self._actions[name] = list(listed)

    def check(self, tasks: Mapping[str, Collection[str]]) -> None:
        """Raise a UserError if an action can never run.

        Args:
          tasks: {mode: tasks that have metrics in this run}; a mode that is missing or empty never runs.
        """
        for mode, actions in self._actions.items():
            evaluated = tasks.get(mode, ())
            for action in actions:
                if not evaluated:
                    raise UserError(
                        f"train.actions[{mode!r}] has {action}, but this run has no such evaluation. Turn it on "
                        "(its dataset is train.train_eval_dataset_cfg or train.infer_eval_dataset_cfg), or remove it."
                    )
                if action.task is not None and action.task not in evaluated:
                    raise UserError(
                        f"train.actions[{mode!r}] has {action}, but there is no task {action.task!r} in that mode. It "
                        f"has {', '.join(evaluated)}."
                    )

    def has(self, mode: str) -> bool:
        """Return whether there are actions of this mode."""
        return bool(self._actions.get(mode))

    def end_on_nan(self, step: int) -> ActionStop | None:
        """Return the stop that a TerminateOnNanAction of mode TRAIN requests for a non-finite value, or None."""
        for action in self._actions.get("TRAIN", ()):
            if isinstance(action, TerminateOnNanAction):
                return ActionStop(step, str(action), "the loss or a gradient is not finite", action.worth_saving)
        return None

    def run(self, mode: str, train_state: TrainState, metrics_by_task: MetricsByTask) -> ActionStop | None:
        """Run every action of the mode. Return the first stop, or None.

        With several processes, the first one decides: some metrics, such as times, differ between them.
        """
        stop = None
        values = {task: _as_scalars(metrics) for task, metrics in metrics_by_task.items()}
        for action in self._actions.get(mode, ()):
            if action.run(train_state, values) and stop is None:
                stop = ActionStop(int(train_state.step), str(action), action.reason, action.worth_saving)
        if self.has(mode):
            decided = distributed.broadcast("actions", stop and dataclasses.asdict(stop))
            stop = decided and ActionStop(**decided)
        return stop

    def state(self) -> dict[str, Any]:
        """Return the state of all actions; it is JSON-serializable."""
        return {
            mode: [[str(action), action.state(), action.settings()] for action in actions]
            for mode, actions in self._actions.items()
        }

    def same_as(self, state: Mapping[str, Any]) -> bool:
        """Return whether `state` is that of the same actions with the same settings."""

        def settings(saved: Mapping[str, Any]) -> dict[str, Any]:
            return {mode: [[name, *options] for name, _, *options in records] for mode, records in saved.items()}

        return settings(self.state()) == settings(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the actions that `state` includes. Others start over."""
        for mode, actions in self._actions.items():
            records = list(state.get(mode, ()))
            for action in actions:
                record = next((record for record in records if record[0] == str(action)), None)
                if record is not None:
                    records.remove(record)
                    action.restore(record[1])


def _as_scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Scalar(value) if isinstance(value, int | float) else value for name, value in metrics.items()}


def _metric_of(action: Any, metrics_by_task: MetricsByTask) -> float | None:
    """Return the value of the action's metric; log a warning and return None if there is none, as T5X does."""
    task, metric = action.task, action.metric
    if task not in metrics_by_task:
        log.warning("%s does nothing: there is no task %r. There is %s.", action, task, ", ".join(metrics_by_task))
        return None
    if metric not in metrics_by_task[task]:
        log.warning(
            "%s does nothing: task %r has no metric %r. It has %s. Set `metric` of trainer.%s to one of them.",
            action, task, metric, ", ".join(sorted(metrics_by_task[task])), type(action).__name__,
        )  # fmt: skip
        return None
    value = metrics_by_task[task][metric]
    try:
        return float(value.value if hasattr(value, "value") else value)
    except (TypeError, ValueError):
        log.warning("%s does nothing: %r of %r is %r, which is not a number.", action, metric, task, value)
        return None
