"""The training loop: steps, and what falls due between them."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection

import jax

from t5x.data.loader import TrainLoader
from t5x.errors import UserError
from t5x.metrics.accumulators import Metrics, compute, merge, to_json
from t5x.telemetry import MetricWriter, Progress, ThroughputClock
from t5x.trainer.signals import StopRequest
from t5x.trainer.trainer import Trainer, gather, learning_rate_at

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Timetable:
    """When things fall due, counted from step 0 of the model, so that a resumed run keeps the same times.

    Attributes:
      total_steps: the last step.
      stats_period: steps between lines of metrics.
      eval_period: steps between evaluations; 0 is never before the end.
      save_period: steps between checkpoints; None is only at the end.
      save_steps: further steps to save at.
    """

    total_steps: int
    stats_period: int
    eval_period: int
    save_period: int | None
    save_steps: Collection[int] = ()

    def stats_due(self, step: int) -> bool:
        return step % self.stats_period == 0 or step == self.total_steps

    def eval_due(self, step: int) -> bool:
        return step == self.total_steps or (self.eval_period > 0 and step % self.eval_period == 0)

    def save_due(self, step: int) -> bool:
        periodic = self.save_period is not None and step % self.save_period == 0
        return step == self.total_steps or periodic or step in self.save_steps


_SLOW_DATA = 0.1
_SLOW_DATA_HINT = (
    "%.0f %% of the time goes into waiting for data. More processes that read it may help "
    "(utils.DatasetConfig.num_workers), or a cache of its tokens (`t5x cache TASK`)"
)


@dataclasses.dataclass
class Window:
    """The metrics since the last line of them was written.

    Those of a checkpoint in the middle of a window travel with it, so that the next line is the same as that of a run
    that was never stopped.
    """

    before: Metrics | None = None
    pending: list[Metrics] = dataclasses.field(default_factory=list)

    def gathered(self) -> Metrics | None:
        """All of it on the host; waits for the devices."""
        parts = ([] if self.before is None else [self.before]) + ([gather(self.pending)] if self.pending else [])
        self.before, self.pending = functools.reduce(merge, parts) if parts else None, []
        return self.before

    def to_json(self) -> dict[str, list] | None:
        gathered = self.gathered()
        return None if gathered is None else to_json(gathered)


def run_loop(
    trainer: Trainer,
    loader: TrainLoader,
    times: Timetable,
    *,
    first_step: int,
    window: Window,
    save: Callable[[int], None],
    evaluate: Callable[[int], None],
    writer: MetricWriter,
    stop: StopRequest,
) -> int:
    """Trains from `first_step` to the end or until `stop` asks; returns the number of the last step taken.

    Saves when due, at the end, and on a stop. Throughput counts neither evaluation nor saving.
    """
    clock = ThroughputClock()
    step = saved = first_step
    with Progress(times.total_steps, initial=first_step, description="train") as progress:
        shown: dict[str, float] = {}
        told = False
        while step < times.total_steps and not stop:
            try:
                with clock.waiting_for_data():
                    batch = next(loader)
            except UserError:
                if step > saved:
                    log.info("the data ends the run at step %d; what was trained is saved first", step)
                    save(step)
                raise
            window.pending.append(trainer.step(batch))
            step += 1
            stop.something_to_save = True
            clock.add(sequences=_rows(batch), target_tokens=0)
            if len(window.pending) > 1:
                # One step ahead of the devices is enough to keep them busy; more would only delay a stop.
                jax.block_until_ready(window.pending[-2])
            if times.stats_due(step):
                figures = compute(window.gathered())
                window.before = None
                target_tokens = int(figures.pop("target_tokens"))
                clock.add(steps=0, sequences=0, target_tokens=target_tokens)
                lap = clock.lap()
                figures["learning_rate/current"] = learning_rate_at(trainer.learning_rate_fn, step - 1)
                figures |= lap.scalars(cores=jax.device_count()) | {"timing/uptime": clock.uptime()}
                figures |= {f"effective_batch_size/{name}": _rows(batch) for name in ("inputs", "targets")}
                writer.write_scalars(step, figures)
                if not math.isfinite(figures["loss"]):
                    log.warning("the loss is %s at step %d: the learning rate may be too high", figures["loss"], step)
                shown = {"loss": figures["loss_per_nonpadding_target_token"], "tokens/s": lap.target_tokens_per_second}
                if lap.data_wait_share > _SLOW_DATA:
                    shown["waiting for data %"] = 100 * lap.data_wait_share
                    if not told:
                        log.warning(_SLOW_DATA_HINT, 100 * lap.data_wait_share)
                    told = True
            progress.update(step, **shown)
            if times.save_due(step):
                with clock.paused():
                    writer.flush()
                    save(step)
                    saved = step
            if times.eval_due(step) and not stop:
                with clock.paused():
                    evaluate(step)
        if step > saved:
            writer.flush()
            save(step)
    return step


def _rows(batch: dict) -> int:
    """Rows of the global batch."""
    return len(batch["decoder_target_tokens"]) * jax.process_count()
