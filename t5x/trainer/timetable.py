"""When a training run saves, evaluates, logs metrics and collects garbage."""

import dataclasses
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The schedule of a run, counted from step 0 of the model, so that a resumed run keeps it.

    Attributes:
      total_steps: the last step.
      stats_period: steps between lines of metrics.
      eval_periods: {mode of evaluation: steps between evaluations}; 0 evaluates only at the end.
      save_period: steps between checkpoints; None saves only at the end.
      save_steps: additional steps to save at.
      gc_period: steps between garbage collections; 0 leaves them to Python.
    """

    total_steps: int
    stats_period: int
    eval_periods: Mapping[str, int | None]
    save_period: int | None
    save_steps: Collection[int] = ()
    gc_period: int | None = 0

    def stats_due(self, step: int) -> bool:
        return self._due(step, self.stats_period)

    def evaluations_due(self, step: int) -> list[str]:
        """Return the modes to evaluate after this step."""
        return [mode for mode, period in self.eval_periods.items() if self._due(step, period)]

    def save_due(self, step: int) -> bool:
        return self._due(step, self.save_period) or step in self.save_steps

    def _due(self, step: int, period: int | None) -> bool:
        return step == self.total_steps or bool(period and step % period == 0)
