"""Learning rate schedules."""

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x._runtime.errors import ArgumentError

Schedule = Callable[[jax.Array | int], jax.Array]


def create_learning_rate_scheduler(
    factors: str = "constant * linear_warmup * rsqrt_decay",
    base_learning_rate: float = 0.5,
    warmup_steps: int = 1000,
    decay_factor: float = 0.5,
    steps_per_decay: int = 20000,
    steps_per_cycle: int = 100000,
    step_offset: int = 0,
    min_learning_rate: float = 1e-8,
) -> Schedule:
    """Return a schedule that is the product of named factors.

    Args:
      factors: names joined by `*`:
        `constant`: base_learning_rate;
        `linear_warmup`: min(1, step / warmup_steps);
        `linear_decay`: base_learning_rate · min(step / warmup_steps, 1 + decay_factor · (warmup_steps - step));
        `rsqrt_decay`: 1 / sqrt(max(step, warmup_steps));
        `rsqrt_normalized_decay`: sqrt(warmup_steps) / sqrt(max(step, warmup_steps));
        `decay_every`: decay_factor ^ (step // steps_per_decay);
        `cosine_decay`: half a cosine over every `steps_per_cycle` steps after the warmup.
      base_learning_rate, warmup_steps, decay_factor, steps_per_decay, steps_per_cycle: see `factors`.
      step_offset: step that counts as step 0.
      min_learning_rate: lower bound of the result.

    Returns:
      step -> learning rate, float32.

    Raises:
      ArgumentError: if a factor is unknown, or needs warmup_steps of at least 1.

    Example:
      >>> schedule = create_learning_rate_scheduler("constant * rsqrt_decay", 1.0, warmup_steps=10000)
      >>> round(float(schedule(5)), 6)
      0.01
    """
    names = [name.strip() for name in factors.split("*") if name.strip()]
    rules: dict[str, Callable[[jax.Array], jax.Array | float]] = {
        "constant": lambda step: base_learning_rate,
        "linear_warmup": lambda step: jnp.minimum(1.0, step / warmup_steps),
        "linear_decay": lambda step: (
            base_learning_rate * jnp.minimum(step / warmup_steps, 1.0 + decay_factor * (warmup_steps - step))
        ),
        "rsqrt_decay": lambda step: 1.0 / jnp.sqrt(jnp.maximum(step, warmup_steps)),
        "rsqrt_normalized_decay": lambda step: jnp.sqrt(warmup_steps / jnp.maximum(step, warmup_steps)),
        "decay_every": lambda step: decay_factor ** (step // steps_per_decay),
        "cosine_decay": lambda step: jnp.maximum(
            0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (jnp.maximum(0.0, step - warmup_steps) / steps_per_cycle % 1.0)))
        ),
    }
    setting = "create_learning_rate_scheduler"
    if unknown := [name for name in names if name not in rules]:
        raise ArgumentError(f"{setting}.factors names {unknown[0]!r}; known factors are {', '.join(rules)}.")
    warmed_up = {"linear_warmup", "linear_decay", "rsqrt_decay", "rsqrt_normalized_decay"}.intersection(names)
    if warmed_up and warmup_steps < 1:
        raise ArgumentError(f"{setting}.warmup_steps is {warmup_steps}, but {min(warmed_up)!r} needs at least 1.")

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.maximum(0, jnp.asarray(step) - step_offset).astype(jnp.float32)
        rate = jnp.float32(1.0)
        for name in names:
            rate = rate * rules[name](step)
        return jnp.maximum(rate, min_learning_rate).astype(jnp.float32)

    return schedule


log = logging.getLogger(__name__)

Rate = float | jax.Array | Schedule

_SAMPLES = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
_TRAINER_RATE_IGNORED = (
    "trainer.Trainer.learning_rate_fn is ignored: the optimizer has its own learning rate (%.4g instead of %.4g at "
    "step %d), which is applied and logged. To use the trainer's schedule, take an optimizer of t5x.optimizers and "
    "leave its learning_rate unset."
)


def as_schedule(rate: Rate) -> Schedule:
    """Return a number or a schedule as a schedule of float32 arrays."""
    return lambda step: jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)


def unknown_rate(step: jax.Array | int) -> jax.Array:
    """Return NaN: the schedule of an optimizer whose learning rate cannot be read."""
    return jnp.float32(math.nan)


def applied_schedule(optimizer: Any, trainer_schedule: Schedule, state: Any, step: jax.Array | int) -> Schedule:
    """Return the schedule, by the trainer's steps, that the optimizer applies, for the log.

    Log a warning if it differs from the trainer's schedule, or cannot be read.

    Args:
      optimizer: see `t5x.optimizers.OptimizerDef`.
      trainer_schedule: the trainer's schedule.
      state: the optimizer's state at the start of the run.
      step: the trainer's step at the start of the run.
    """
    own = getattr(optimizer, "learning_rate_fn", None)
    if own is None:
        if getattr(optimizer, "learning_rate", None) is not None:
            log.warning("the optimizer's learning_rate is ignored: trainer.Trainer.learning_rate_fn is applied")
        return trainer_schedule
    if own is unknown_rate:
        log.warning(
            "the learning rate is inside the optimizer and cannot be read: trainer.Trainer.learning_rate_fn is ignored "
            "and the metric learning_rate is nan. Also pass the rate as learning_rate of optimizers.chain or "
            "optimizers.OptaxWrapper."
        )
        return unknown_rate
    if isinstance(step, jax.ShapeDtypeStruct):  # of a state that is only traced
        return own
    step = int(step)
    counter = getattr(optimizer, "count", None)
    count = None if counter is None else counter(state)
    offset = 0 if count is None else step - count
    schedule = own if not offset else lambda step: own(step - offset)
    if offset:
        log.info("the optimizer's learning rate counts from its own first step: step %d is its step %d", step, count)
    for sample in (step + steps for steps in _SAMPLES):
        applied, ignored = float(schedule(sample)), float(trainer_schedule(sample))
        if not math.isclose(applied, ignored, rel_tol=1e-5, abs_tol=1e-12):
            log.warning(_TRAINER_RATE_IGNORED, applied, ignored, sample)
            break
    return schedule


class TransformationWithRates(optax.GradientTransformationExtraArgs):
    """A transformation that knows its learning rates.

    Attributes:
      learning_rates: numbers or schedules.
    """

    learning_rates: list[Any]


@functools.cache
def record_learning_rates(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of Optax so that transformations it returns are `TransformationWithRates`.

    The rates are its argument `learning_rate` and those of transformations among its arguments.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, optax.GradientTransformation):
            return result
        is_transformation = lambda node: isinstance(node, optax.GradientTransformation)
        rates = [rate for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_transformation) for rate in rates_in(leaf)]
        own = signature.bind(*args, **kwargs).arguments.get("learning_rate")
        if own is not None:
            rates.append(own)
        if rates:
            result = TransformationWithRates(*optax.with_extra_args_support(result))
            result.learning_rates = rates
        return result

    call.__signature__ = signature  # type: ignore[attr-defined]  # gin does not follow __wrapped__
    return call


def rates_in(transformation: Any) -> list[Any]:
    """Return the learning rates that a transformation is known to have."""
    return transformation.learning_rates if isinstance(transformation, TransformationWithRates) else []
