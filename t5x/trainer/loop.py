"""The training loop: steps, and what falls due between them."""

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from t5x.data.loader import TrainLoader
from t5x.optimizers import trained
from t5x.telemetry import Progress, ThroughputClock
from t5x.trainer.actions import TRAIN_TASK, Actions, ActionStop
from t5x.trainer.lines import MetricLines
from t5x.trainer.nonfinite import bad_parameters, diagnose
from t5x.trainer.signals import StopRequest
from t5x.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Timetable:
    """When things fall due, counted from step 0 of the model, so that a resumed run keeps the same times.

    Attributes:
      total_steps: the last step.
      stats_period: steps between lines of metrics.
      train_eval_period, infer_eval_period: steps between evaluations of either kind; 0 is never before the end.
      save_period: steps between checkpoints; None is only at the end.
      save_steps: further steps to save at.
      gc_period: steps between collections of Python's garbage; 0 leaves that to Python.
    """

    total_steps: int
    stats_period: int
    train_eval_period: int
    infer_eval_period: int
    save_period: int | None
    save_steps: Collection[int] = ()
    gc_period: int = 0

    def stats_due(self, step: int) -> bool:
        return step == self.total_steps or _due(step, self.stats_period)

    def train_eval_due(self, step: int) -> bool:
        return step == self.total_steps or _due(step, self.train_eval_period)

    def infer_eval_due(self, step: int) -> bool:
        return step == self.total_steps or _due(step, self.infer_eval_period)

    def evaluation_due(self, step: int) -> bool:
        return self.train_eval_due(step) or self.infer_eval_due(step)

    def save_due(self, step: int) -> bool:
        return step == self.total_steps or _due(step, self.save_period) or step in self.save_steps

    def gc_due(self, step: int) -> bool:
        return _due(step, self.gc_period)


def _due(step: int, period: int | None) -> bool:
    return bool(period) and step % period == 0


def run_loop(
    trainer: Trainer,
    loader: TrainLoader,
    times: Timetable,
    *,
    first_step: int,
    batch_size: int,
    lines: MetricLines,
    clock: ThroughputClock,
    save: Callable[[int, Mapping[str, Any], ActionStop | None], None],
    evaluate: Callable[[int], ActionStop | None],
    actions: Actions,
    stop: StopRequest,
    show_progress: bool = True,
) -> tuple[int, ActionStop | None]:
    """Trains from `first_step` to the end, or until `stop` asks or an action ends it.

    Saves when due, at the end, and on a stop, but never parameters that are not finite. Throughput counts neither
    evaluation nor saving.

    Args:
      save: takes the step, the position in the data after it, and the action that ends the run there.

    Returns:
      (the number of the last step taken, the action that ended the run if one did).
    """
    step = saved = first_step
    position = loader.state()
    running, ended = None, None
    watch = _NonFiniteWatch(trainer, actions)
    progress = Progress(times.total_steps, initial=first_step, description="train") if show_progress else None

    def finish() -> None:
        """Waits for the step that the devices compute, which counts from then on."""
        nonlocal running
        if running is not None:
            jax.block_until_ready(running)
            clock.add(sequences=batch_size, target_tokens=0)
            running = None

    with progress or contextlib.nullcontext(), _garbage_collection(times):
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
                    ended = watch.look(lines, step)  # at the line before: this one is computed while the next steps run
                    if clock.is_new:
                        finish()
                    others = {f"effective_batch_size/{name}": batch_size for name in ("inputs", "targets")}
                    lap = clock.lap()
                    lines.line(step, lap, others | clock.scalars() | clock.notes())
                    if actions.has("TRAIN"):
                        lines.wait()
                        ended = actions.run("TRAIN", trainer.state, {TRAIN_TASK: lines.figures}) or ended
                        ended = watch.look(lines, step) or ended
                if times.gc_due(step):
                    gc.collect()
                if progress is not None:
                    progress.update(step, **lines.shown)
                if times.save_due(step):
                    finish()
                    with clock.apart("timing/checkpoint_seconds"):
                        ended = watch.look_well(lines, step) or ended
                        if ended is None or ended.worth_saving:
                            saved = step
                            save(step, position, ended)
                if ended is None and not stop and times.evaluation_due(step):
                    finish()
                    with clock.apart("timing/evaluate_seconds"):
                        ended = evaluate(step)
            ended = watch.look_well(lines, step) or ended
            if progress is not None:
                progress.update(step, **lines.shown)
        except Exception:
            # Bad data, an evaluation without memory … Of several processes this one alone cannot save.
            if step > saved and jax.process_count() == 1:
                log.info("the run ends at step %d with an error; what was trained is saved first", step)
                try:
                    if watch.look_well(lines, step) is None:
                        save(step, position, None)
                except Exception as error:
                    log.warning("it could not be saved: %s", error)
            raise
        if step > saved and (ended is None or ended.worth_saving):
            save(step, position, ended)
    return step, ended


class _NonFiniteWatch:
    """Says what is not finite, the first time, and ends the run where that is to end it.

    All processes ask at the same steps.
    """

    def __init__(self, trainer: Trainer, actions: Actions):
        self._trainer, self._actions = trainer, actions
        self._told = False

    def look(self, lines: MetricLines, step: int) -> ActionStop | None:
        """The end of the run, unsaved, where a loss or gradient was bad and the state is, or an action waits for it."""
        found = lines.take_nonfinite()
        if found is None:
            return None
        params = self._trainer.state.params
        diagnosis = diagnose(found.steps, found.last_step, params, trained(self._trainer.model.optimizer_def, params))
        if not self._told or diagnosis.parameters:
            log.warning("%s", diagnosis.message)
        self._told = True
        end = self._actions.end_on_nan(step)
        return _bad_end(step) if end is None and diagnosis.parameters else end

    def look_well(self, lines: MetricLines, step: int) -> ActionStop | None:
        """The same, of all steps and of the parameters themselves: an update may be bad where its gradient was not."""
        lines.unfinished(step)
        end = self.look(lines, step)
        if end is None and (message := bad_parameters(self._trainer.state.params, step)):
            log.warning("%s", message)
            end = _bad_end(step)
        return end


def _bad_end(step: int) -> ActionStop:
    return ActionStop(step, "a parameter that is not finite", "training cannot recover from it", False)


@contextlib.contextmanager
def _garbage_collection(times: Timetable) -> Iterator[None]:
    """With a period of its own, Python's collection does not come in between: it would hold up all processes."""
    if not times.gc_period:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
