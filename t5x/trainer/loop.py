"""The training loop: steps, and what falls due between them."""

import dataclasses
import logging
from collections.abc import Callable, Collection

import jax

from t5x.data.loader import TrainLoader
from t5x.metrics.accumulators import Metrics
from t5x.telemetry import MetricWriter, Progress, ThroughputClock
from t5x.trainer.signals import StopRequest
from t5x.trainer.trainer import Trainer, learning_rate_at, summarize

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


def run_loop(
    trainer: Trainer,
    loader: TrainLoader,
    times: Timetable,
    *,
    first_step: int,
    save: Callable[[int], None],
    evaluate: Callable[[int], None],
    writer: MetricWriter,
    stop: StopRequest,
    on_stats: Callable[[int, dict[str, float]], None] = lambda step, figures: None,
) -> int:
    """Trains from `first_step` to the end or until `stop` asks; returns the number of the last step taken.

    Saves when due, at the end, and on a stop. Throughput counts neither evaluation nor saving.
    """
    clock = ThroughputClock()
    pending: list[Metrics] = []
    step = first_step
    with Progress(times.total_steps, initial=first_step, description="train") as progress:
        shown: dict[str, float] = {}
        while step < times.total_steps and not stop:
            with clock.waiting_for_data():
                batch = next(loader)
            pending.append(trainer.step(batch))
            step += 1
            clock.add(sequences=_rows(trainer, batch), target_tokens=0)
            if len(pending) > 1:
                # One step ahead of the devices is enough to keep them busy; more would only delay a stop.
                jax.block_until_ready(pending[-2])
            if times.stats_due(step) or stop:
                figures = summarize(pending)
                pending.clear()
                target_tokens = int(figures.pop("target_tokens"))
                clock.add(steps=0, sequences=0, target_tokens=target_tokens)
                lap = clock.lap()
                figures["learning_rate/current"] = learning_rate_at(trainer.learning_rate_fn, step - 1)
                figures |= lap.scalars(cores=jax.device_count()) | {"timing/uptime": clock.uptime()}
                figures |= {f"effective_batch_size/{name}": _rows(trainer, batch) for name in ("inputs", "targets")}
                writer.write_scalars(step, figures)
                on_stats(step, figures)
                shown = {"loss": figures["loss_per_nonpadding_target_token"], "tokens/s": lap.target_tokens_per_second}
            progress.update(step, **shown)
            if times.save_due(step) and not stop:
                with clock.paused():
                    save(step)
            if times.eval_due(step) and not stop:
                with clock.paused():
                    evaluate(step)
    if stop and step > first_step:
        save(step)
    writer.flush()
    return step


def _rows(trainer: Trainer, batch: dict) -> int:
    """Rows of the global batch."""
    return len(batch["decoder_target_tokens"]) * jax.process_count()
