"""Which learning rate is applied, so that this one is logged.

An optimizer without `learning_rate_fn` (None) is driven by the trainer's schedule. One with it applies its own, by the
number of steps that its state has seen, and the trainer's is not used. Where several work together, each applies what
it would alone, and one rate is logged: the trainer's if it drives any of them.
"""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp

from t5x.schedules import Schedule

log = logging.getLogger(__name__)

Rate = float | jax.Array | Schedule

_SAMPLES = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


def as_schedule(rate: Rate) -> Schedule:
    """A number or a schedule as a schedule that gives a float32 array."""
    return lambda step: jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)


def unknown(step: jax.Array | int) -> jax.Array:
    """The rate of an optimizer that does not tell it: not a number, rather than a wrong one."""
    return jnp.float32(math.nan)


def applied_schedule(optimizer: Any, trainers: Schedule, state: Any, step: jax.Array | int) -> Schedule:
    """The schedule, by the trainer's steps, that this optimizer applies: the one to log. Contradictions are warned of.

    Args:
      trainers: the trainer's own.
      state: of the optimizer at the start of the run.
      step: of the trainer there.
    """
    own = getattr(optimizer, "learning_rate_fn", None)
    if own is None:
        return trainers
    if own is unknown:
        log.warning(
            "the learning rate is inside the optimizer and cannot be read: trainer.Trainer.learning_rate_fn is not "
            "used, and the metric learning_rate is nan. Give the rate as learning_rate of optimizers.chain or "
            "optimizers.OptaxWrapper as well."
        )
        return unknown
    step = int(step)
    counter = getattr(optimizer, "count", None)
    count = None if counter is None else counter(state)
    offset = 0 if count is None else step - count
    schedule = own if not offset else lambda at: own(at - offset)
    if offset:
        log.info("the optimizer's learning rate counts from its own first step: step %d is its %d", step, count)
    for at in _SAMPLES:
        applied, given = float(schedule(step + at)), float(trainers(step + at))
        if not math.isclose(applied, given, rel_tol=1e-5, abs_tol=1e-12):
            log.warning(
                "trainer.Trainer.learning_rate_fn is not used: the optimizer has a learning rate of its own (%.4g "
                "instead of %.4g at step %d), which is applied and logged. An optimizer of t5x.optimizers without "
                "learning_rate is driven by the trainer's.",
                applied, given, step + at,
            )  # fmt: skip
            break
    return schedule
