"""The training loop: steps, and the metrics, saves and evaluations between them."""

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from t5x.data.loader import TrainLoader
from t5x.optimizers.protocol import trained
from t5x.telemetry import Progress, ThroughputClock
from t5x.trainer.actions import TRAIN_TASK, Actions, ActionStop
from t5x.trainer.datasets import ExternalBatches
from t5x.trainer.metric_lines import MetricLines
from t5x.trainer.nonfinite import bad_parameters, diagnose
from t5x.trainer.signals import StopRequest
from t5x.trainer.trainer import BaseTrainer


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


log = logging.getLogger(__name__)


def run_loop(
    trainer: BaseTrainer,
    loader: TrainLoader | ExternalBatches,
    times: Timetable,
    *,
    first_step: int,
    batch_size: int,
    lines: MetricLines,
    clock: ThroughputClock,
    save: Callable[[int, Mapping[str, Any], ActionStop | None], None],
    evaluate: Callable[[int, Sequence[str]], ActionStop | None],
    actions: Actions,
    stop: StopRequest,
    show_progress: bool = True,
    counted_from: int = 0,
) -> tuple[int, ActionStop | None]:
    """Train from `first_step` to the last step, or until a stop request or an action ends the run.

    Saves on schedule, at the end and on a stop, but never non-finite parameters. Throughput excludes evaluation and
    saving.

    Args:
      save: called with the step, the data position after it and the action that ends the run there.
      evaluate: called with the step and the modes that are due.
      counted_from: the step that the progress display counts as 0.

    Returns:
      The last step, and the action that ended the run or None.
    """
    step = saved = first_step
    position = loader.state()
    running, ended = None, None
    watch = _NonFiniteWatch(trainer, actions)
    progress = Progress(
        times.total_steps - counted_from, first_step - counted_from, description="train", disable=not show_progress
    )

    def finish() -> None:
        """Wait for the step in flight, then count it."""
        nonlocal running
        if running is not None:
            jax.block_until_ready(running)
            clock.add(sequences=batch_size, target_tokens=0)
            running = None

    with progress, _garbage_collection(times):
        clock.start()
        try:
            while step < times.total_steps and ended is None and not stop.here():
                with clock.waiting_for_data():
                    batch = next(loader)
                metrics = trainer.step(batch)
                lines.add(metrics)
                step, position = step + 1, loader.state()
                stop.something_to_save = True
                # One step ahead of the devices is enough to keep them busy; more would only delay a stop.
                finish()
                running = metrics
                if times.stats_due(step):
                    # Up to the previous line: the metrics of this one are computed while the next steps run.
                    ended = watch.check(lines, step)
                    if clock.is_new:
                        finish()
                    others = {f"effective_batch_size/{name}": batch_size for name in ("inputs", "targets")}
                    lap = clock.lap()
                    lines.line(step, lap, others | clock.scalars() | clock.notes())
                    if actions.has("TRAIN"):
                        lines.wait()
                        ended = actions.run("TRAIN", trainer.train_state, {TRAIN_TASK: lines.metrics}) or ended
                        ended = watch.check(lines, step) or ended
                if times.gc_period and step % times.gc_period == 0:
                    gc.collect()
                progress.update(step - counted_from, **lines.summary)
                if times.save_due(step):
                    finish()
                    with clock.apart("timing/checkpoint_seconds"):
                        ended = watch.check_all(lines, step) or ended
                        if ended is None or ended.worth_saving:
                            saved = step
                            save(step, position, ended)
                if ended is None and not stop and (modes := times.evaluations_due(step)):
                    finish()
                    with clock.apart("timing/evaluate_seconds"):
                        ended = evaluate(step, modes)
            ended = watch.check_all(lines, step) or ended
            progress.update(step - counted_from, **lines.summary)
        except Exception:
            # Bad data, an evaluation without memory … Of several processes this one alone cannot save.
            if step > saved and jax.process_count() == 1:
                log.info("an error ends the run after step %d; saving first", step)
                try:
                    if watch.check_all(lines, step) is None:
                        save(step, position, None)
                except Exception as error:
                    log.warning("step %d could not be saved: %s", step, error)
            raise
        if step > saved and (ended is None or ended.worth_saving):
            save(step, position, ended)
    return step, ended


class _NonFiniteWatch:
    """A check for non-finite values that logs the first finding and decides whether the run ends.

    Every process checks at the same steps.
    """

    def __init__(self, trainer: BaseTrainer, actions: Actions):
        self._trainer, self._actions = trainer, actions
        self._warned = False

    def check(self, lines: MetricLines, step: int) -> ActionStop | None:
        """Check the logged losses and gradients. Return the reason to end the run unsaved, or None."""
        bad = lines.take_nonfinite()
        if bad is None:
            return None
        params = self._trainer.train_state.params
        diagnosis = diagnose(bad.steps, bad.last_step, params, trained(self._trainer.model.optimizer_def, params))
        if not self._warned or diagnosis.parameters:
            log.warning("%s", diagnosis.message)
        self._warned = True
        end = self._actions.end_on_nan(step)
        return _bad_end(step) if end is None and diagnosis.parameters else end

    def check_all(self, lines: MetricLines, step: int) -> ActionStop | None:
        """Check all steps and the parameters themselves: an update may be bad although its gradient was not."""
        lines.unfinished(step)
        end = self.check(lines, step)
        if end is None and (message := bad_parameters(self._trainer.train_state.params, step)):
            log.warning("%s", message)
            end = _bad_end(step)
        return end


def _bad_end(step: int) -> ActionStop:
    return ActionStop(step, "a parameter that is not finite", "training cannot recover from it", False)


@contextlib.contextmanager
def _garbage_collection(times: Timetable) -> Iterator[None]:
    """Disable automatic garbage collection if the timetable has a period: a collection blocks all processes."""
    if not times.gc_period:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
