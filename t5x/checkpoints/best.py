"""Which checkpoints of a run are the best by a metric, so that they stay.

The values are those that the run writes down itself, so that a run that is started again knows them too:

    train/<metric>                   MODEL_DIR/train/metrics.jsonl
    training_eval/<task>/<metric>    MODEL_DIR/training_eval/<task>/metrics.jsonl
    inference_eval/<task>/<metric>   MODEL_DIR/inference_eval/<task>-metrics.jsonl (seqio.JSONLogger)

A checkpoint has a value if one was written for its very step. The best one is noted in MODEL_DIR/best.json.
"""

import dataclasses
import functools
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from t5x.checkpoints import paths
from t5x.errors import UserError
from t5x.telemetry import jsonl
from t5x.telemetry.writer import METRICS_FILE

log = logging.getLogger(__name__)

BEST_FILE = "best.json"


@dataclasses.dataclass(frozen=True)
class BestRule:
    """What makes a checkpoint stay besides being new.

    Attributes:
      metric: its name, see above. `eval/`, which T5X's names have before the metric, may be left out.
      mode: whether the largest or the smallest value is the best.
      keep: how many of the best stay; None is all.
      keep_without_metric: whether checkpoints without a value stay.
      keep_period: checkpoints of steps that are a multiple of it stay; None is none.
    """

    metric: str
    mode: Literal["max", "min"] = "max"
    keep: int | None = 1
    keep_without_metric: bool = True
    keep_period: int | None = None


@dataclasses.dataclass(frozen=True)
class SaveBestCheckpointer:
    """T5X's way to ask for it: `utils.SaveCheckpointConfig.checkpointer_cls = @checkpoints.SaveBestCheckpointer`.

    As in T5X, `SaveCheckpointConfig.keep` is then the number of the best, and the newest stays besides.
    """

    metric_name_to_monitor: str = "train/accuracy"
    metric_mode: Literal["max", "min"] = "max"
    keep_checkpoints_without_metrics: bool = True
    force_keep_period: int | None = None

    @classmethod
    def of(cls, maker: Any) -> "SaveBestCheckpointer | None":
        """What `maker` makes, if it is this class, from gin or as a functools.partial."""
        inner = maker
        while not inspect.isclass(inner) and (behind := _behind(inner)) is not None:
            inner = behind
        return maker() if inspect.isclass(inner) and issubclass(inner, cls) else None

    def rule(self, keep: int | None) -> BestRule:
        return BestRule(
            self.metric_name_to_monitor,
            self.metric_mode,
            keep,
            self.keep_checkpoints_without_metrics,
            self.force_keep_period,
        )


class Ranking:
    """The checkpoints of a MODEL_DIR by the metric of a rule."""

    def __init__(self, rule: BestRule, model_dir: str | os.PathLike[str]):
        self.rule = rule
        self._model_dir = os.fspath(model_dir)
        self._told: set[str] = set()

    def check(self, groups: Collection[str]) -> None:
        """Raises where the run will never write such a metric.

        Args:
          groups: what it writes metrics of: `train`, `training_eval/<task>`, `inference_eval/<task>`.
        """
        if not any(self.rule.metric.startswith(f"{group}/") for group in groups):
            raise UserError(
                f"Checkpoints are to be ranked by {self.rule.metric!r}, but this run writes only metrics that begin "
                f"with {', '.join(f'{group}/' for group in groups)}. Mend utils.SaveCheckpointConfig.best_metric, or "
                "turn that evaluation on."
            )

    def expect(self) -> None:
        """To be called after an evaluation: says, once, that it has written no values."""
        if self._values() == {} and not self._told:
            self._told.add("")
            log.warning(
                "checkpoints cannot be ranked by %s: no value of it has been written. Those of inference_eval are, if "
                "seqio.Evaluator.logger_cls has @seqio.JSONLogger.",
                self.rule.metric,
            )

    def retained(self, steps: Sequence[int]) -> set[int]:
        """Those of the checkpoints' steps that stay because of the rule; what is the best now is said and noted."""
        rule, values = self.rule, self._values()
        if values is None:
            return set(steps)
        worst = -math.inf if rule.mode == "max" else math.inf
        value = lambda step: worst if math.isnan(values[step]) else values[step]
        sign = -1 if rule.mode == "max" else 1
        ranked = sorted((step for step in steps if step in values), key=lambda step: (sign * value(step), step))
        if ranked and not math.isnan(values[ranked[0]]):
            self._note(ranked[0], values[ranked[0]])
        result = set(ranked[: rule.keep])
        if rule.keep_without_metric:
            result.update(step for step in steps if step not in values)
        if rule.keep_period is not None:
            result.update(step for step in steps if step % rule.keep_period == 0)
        return result

    def _note(self, step: int, value: float) -> None:
        path = os.path.join(self._model_dir, BEST_FILE)
        record = {
            "metric": self.rule.metric, "mode": self.rule.mode, "step": step, "value": value,
            "checkpoint": paths.checkpoint_name(step),
        }  # fmt: skip
        line = jsonl.encode(record)
        if not os.path.exists(path) or _read(path) != json.loads(line):
            log.info("the best checkpoint by %s is now that of step %d: %.6g", self.rule.metric, step, value)
            jsonl.replace(path, [line])

    def _values(self) -> dict[int, float] | None:
        """The metric by step, as far as it was written; None where only others were, so that it must be misspelt."""
        misspelt = False
        for path, name in self._places():
            records = [record for record, _ in jsonl.read(path)]
            found = {record["step"]: float(record[name]) for record in records if name in record and "step" in record}
            if found:
                return found
            if records:
                misspelt = True
                self._say_missing(path, name, records)
        return None if misspelt else {}

    def _places(self) -> list[tuple[str, str]]:
        """(file, name in it) that the metric may be at: names of tasks and of metrics may both have slashes."""
        group, *rest = self.rule.metric.split("/")
        if group == "train":
            return [(os.path.join(self._model_dir, group, METRICS_FILE), "/".join(rest))]
        places = []
        for cut in range(len(rest) - 1, 0, -1):
            task, name = "/".join(rest[:cut]), "/".join(rest[cut:])
            if group == "training_eval":
                path = os.path.join(self._model_dir, group, task, METRICS_FILE)
            else:
                path, name = os.path.join(self._model_dir, group, f"{task}-metrics.jsonl"), name.removeprefix("eval/")
            places.append((path, name))
        return places

    def _say_missing(self, path: str, name: str, records: Sequence[dict[str, Any]]) -> None:
        if path not in self._told:
            self._told.add(path)
            there = sorted({key for record in records for key in record} - {"step"})
            log.warning(
                "checkpoints cannot be ranked by %s, so that all of them stay: %s has no %r, it has %s",
                self.rule.metric, path, name, ", ".join(there),
            )  # fmt: skip


def _behind(maker: Any) -> Callable[..., Any] | None:
    return maker.func if isinstance(maker, functools.partial) else getattr(maker, "__wrapped__", None)


def _read(path: str) -> Any:
    return next((record for record, _ in jsonl.read(path)), None)
