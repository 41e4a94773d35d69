"""Ranking of a run's checkpoints by a metric, to keep the best.

The values come from the run's own files, so that a restarted run knows them too:

    train/<metric>                   MODEL_DIR/train/metrics.jsonl
    training_eval/<task>/<metric>    MODEL_DIR/training_eval/<task>/metrics.jsonl
    inference_eval/<task>/<metric>   MODEL_DIR/inference_eval/<task>-metrics.jsonl (seqio.JSONLogger)

A checkpoint has a value if one was written for exactly its step. The best one is recorded in MODEL_DIR/best.json.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, Literal

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths
from t5x.telemetry import jsonl
from t5x.telemetry.metric_writer import METRICS_FILE

log = logging.getLogger(__name__)

BEST_FILE = "best.json"


@dataclasses.dataclass(frozen=True)
class BestRule:
    """Which checkpoints to keep in addition to the newest.

    Attributes:
      metric: its name, see above. `eval/`, which T5X's names have before the metric, may be omitted.
      mode: whether the largest or the smallest value is the best.
      keep: number of best checkpoints to keep; None keeps all.
      keep_without_metric: whether to keep checkpoints without a value; otherwise they count as the worst.
      keep_period: also keep checkpoints whose step is a multiple of this; None keeps none.
    """

    metric: str
    mode: Literal["max", "min"] = "max"
    keep: int | None = 1
    keep_without_metric: bool = True
    keep_period: int | None = None


class Ranking:
    """The checkpoints of a MODEL_DIR, ranked by the metric of a rule."""

    def __init__(self, rule: BestRule, model_dir: str | os.PathLike[str]):
        self.rule = rule
        self._model_dir = os.fspath(model_dir)
        self._warned: set[str] = set()

    def check(self, groups: Collection[str]) -> None:
        """Raise a UserError if the run will never write the metric.

        Args:
          groups: the groups of metrics that it writes: `train`, `training_eval/<task>`, `inference_eval/<task>`.
        """
        if not any(self.rule.metric.startswith(f"{group}/") for group in groups):
            raise UserError(
                f"Checkpoints are ranked by {self.rule.metric!r}, but this run writes only metrics that start with "
                f"{', '.join(f'{group}/' for group in groups)}. Fix utils.SaveCheckpointConfig.best_metric, or enable "
                "that evaluation."
            )

    def expect(self) -> None:
        """Warn, once, if no values have been written. Call this after an evaluation."""
        if self.values() == {} and not self._warned:
            self._warned.add("")
            log.warning(
                "checkpoints cannot be ranked by %s: no value has been written. For metrics of inference_eval, add "
                "@seqio.JSONLogger to seqio.Evaluator.logger_cls.",
                self.rule.metric,
            )

    def retained(self, steps: Sequence[int]) -> set[int]:
        """Return the steps to keep because of the rule; log and record the best one."""
        rule, values = self.rule, self.values()
        if values is None:
            return set(steps)
        sign = -1 if rule.mode == "max" else 1

        def rank(step: int) -> tuple[float, int]:
            return math.inf if math.isnan(values[step]) else sign * values[step], step

        ranked = sorted((step for step in steps if step in values), key=rank)
        if ranked and not math.isnan(values[ranked[0]]):
            self._record_best(ranked[0], values[ranked[0]])
        unranked = [step for step in steps if step not in values]
        if rule.keep_without_metric:
            result = {*ranked[: rule.keep], *unranked}
        else:  # they are the worst, the oldest first; the newest is kept anyway
            result = set((ranked + [step for step in reversed(unranked) if step != steps[-1]])[: rule.keep])
        if rule.keep_period is not None:
            result.update(step for step in steps if step % rule.keep_period == 0)
        return result

    def _record_best(self, step: int, value: float) -> None:
        path = os.path.join(self._model_dir, BEST_FILE)
        record = {
            "metric": self.rule.metric, "mode": self.rule.mode, "step": step, "value": value,
            "checkpoint": paths.checkpoint_name(step),
        }  # fmt: skip
        line = jsonl.encode(record)
        before = [record for record, _ in jsonl.read(path)] if os.path.exists(path) else []
        if before[:1] != [json.loads(line)]:
            log.info("best checkpoint by %s: step %d (%.6g)", self.rule.metric, step, value)
            jsonl.replace(path, [line])

    def values(self) -> dict[int, float] | None:
        """Return {step: value}, empty if nothing was written, None if only other metrics were (a misspelt name)."""
        misspelt = False
        for path, name in self._sources():
            records = [record for record, _ in jsonl.read(path)]
            values = {record["step"]: float(record[name]) for record in records if name in record and "step" in record}
            if values:
                return values
            if records:
                misspelt = True
                self._warn_missing(path, name, records)
        return None if misspelt else {}

    def _sources(self) -> list[tuple[str, str]]:
        """Return the possible (file, name in it) of the metric: task and metric names may both contain slashes."""
        group, *names = self.rule.metric.split("/")
        if group == "train":
            return [(os.path.join(self._model_dir, group, METRICS_FILE), "/".join(names))]
        sources = []
        for cut in range(len(names) - 1, 0, -1):
            task, name = "/".join(names[:cut]), "/".join(names[cut:])
            if group == "training_eval":
                path = os.path.join(self._model_dir, group, task, METRICS_FILE)
            else:
                path, name = os.path.join(self._model_dir, group, f"{task}-metrics.jsonl"), name.removeprefix("eval/")
            sources.append((path, name))
        return sources

    def _warn_missing(self, path: str, name: str, records: Sequence[dict[str, Any]]) -> None:
        if path not in self._warned:
            self._warned.add(path)
            metrics = sorted({key for record in records for key in record} - {"step"})
            log.warning(
                "checkpoints cannot be ranked by %s, so all of them are kept: %s has no %r, only %s",
                self.rule.metric, path, name, ", ".join(metrics),
            )  # fmt: skip
