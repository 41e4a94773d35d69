"""Learning rate schedules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x.errors import ArgumentError

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
