"""Adafactor for one parameter in float64 NumPy, and T5X's learning-rate schedules in Python floats.

A slot dict has the arrays `m`, `v`, `v_row`, `v_col`; those not in use are zeros of shape (1,), as in T5X checkpoints.

    slots = init_slots(param.shape)
    for step, grad in enumerate(grads):
        param, slots = update(param, grad, slots, step, learning_rate(step))
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

BATCH, ROW, COLUMN, NONE = "BATCH", "ROW", "COLUMN", "NONE"

STANDARD_RULES = {
    "vocab": COLUMN,
    "embed": ROW,
    "mlp": COLUMN,
    "heads": COLUMN,
    "kv": COLUMN,
    "joined_kv": COLUMN,
    "relpos_buckets": NONE,
    "layers": BATCH,
    "stack": BATCH,
    "q_wi_fused": COLUMN,
    "o_wo_fused": COLUMN,
    "multiquery_heads": COLUMN,
    "kv_fused": COLUMN,
    "mlp_activations": COLUMN,
    "layer_norm_scale": NONE,
}


@dataclasses.dataclass(frozen=True)
class Dims:
    """How a parameter is treated: dims of the rows and of the columns (both empty: unfactored), and all but BATCH."""

    row: tuple[int, ...]
    column: tuple[int, ...]
    mean: tuple[int, ...]


def treatment(
    shape: Sequence[int],
    axes: Sequence[str] | None = None,
    rules: Mapping[str, str] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    factored: bool = True,
    min_dim_size_to_factor: int = 128,
) -> Dims:
    """Which dims are factored and which are averaged.

    Args:
      axes: logical names of the dims, e.g. ("embed", "layers", "mlp").
      rules: logical name -> BATCH, ROW, COLUMN or NONE; STANDARD_RULES if None.
      kinds: BATCH, ROW, COLUMN or NONE for each dim, told for this parameter: neither names nor sizes count then.
    """
    rank = len(shape)
    told = kinds is not None
    if not told and axes is not None:
        kinds = _kinds(shape, axes, STANDARD_RULES if rules is None else rules)

    # Rank <= 2 without BATCH: sizes decide, names do not. Factored iff both dims are large enough; the columns are the
    # larger dim (of equal ones the later).
    if not told and rank <= 2 and (kinds is None or BATCH not in kinds):
        everything = tuple(range(rank))
        if not factored or rank < 2 or min(shape) < min_dim_size_to_factor:
            return Dims((), (), everything)
        d1, d0 = (int(dim) for dim in np.argsort(shape))
        return Dims((d1,), (d0,), everything)

    if kinds is None:
        raise ValueError(f"a parameter of shape {tuple(shape)} needs logical axes: rank > 2 is not factored by size")
    mean = tuple(dim for dim, kind in enumerate(kinds) if kind != BATCH)
    row = tuple(dim for dim, kind in enumerate(kinds) if kind == ROW)
    column = tuple(dim for dim, kind in enumerate(kinds) if kind == COLUMN)
    if not (factored and row and column):
        return Dims((), (), mean)
    if NONE in kinds:
        raise ValueError(f"axes {axes} mix ROW, COLUMN and NONE: {kinds}")
    return Dims(row, column, mean)


def _kinds(shape: Sequence[int], axes: Sequence[str], rules: Mapping[str, str]) -> tuple[str, ...]:
    if len(axes) != len(shape):
        raise ValueError(f"axes {tuple(axes)} do not fit shape {tuple(shape)}")
    missing = [name for name in axes if name not in rules]
    if missing:
        raise ValueError(f"no factor rule for logical axes {missing}")
    return tuple(rules[name] for name in axes)


def init_slots(
    shape: Sequence[int],
    axes: Sequence[str] | None = None,
    rules: Mapping[str, str] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    beta1: float | None = None,
    factored: bool = True,
    min_dim_size_to_factor: int = 128,
) -> dict[str, np.ndarray]:
    """Zero slots: `v_row` and `v_col` where factored, else `v`; `m` if there is momentum."""
    options = {"factored": factored, "min_dim_size_to_factor": min_dim_size_to_factor}
    dims = treatment(shape, axes, rules, kinds=kinds, **options)
    slots = {name: np.zeros(1) for name in ("m", "v", "v_row", "v_col")}
    if dims.row:
        slots["v_row"] = np.zeros(np.delete(shape, dims.column))
        slots["v_col"] = np.zeros(np.delete(shape, dims.row))
    else:
        slots["v"] = np.zeros(shape)
    if beta1 is not None:
        slots["m"] = np.zeros(shape)
    return slots


def update(
    param: np.ndarray,
    grad: np.ndarray,
    slots: Mapping[str, np.ndarray],
    step: int,
    learning_rate: float,
    *,
    axes: Sequence[str] | None = None,
    rules: Mapping[str, str] | None = None,
    kinds: Sequence[str] | None = None,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    clipping_threshold: float | None = 1.0,
    multiply_by_parameter_scale: bool = True,
    max_parameter_scale: float | None = None,
    beta1: float | None = None,
    weight_decay_rate: float | None = None,
    weight_decay_rate_lr_exponent: float | None = None,
    skip_nan_updates: bool = False,
    epsilon1: float = 1e-30,
    epsilon2: float = 1e-3,
    factored: bool = True,
    min_dim_size_to_factor: int = 128,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One step (the first is step 0). Returns the new parameter and the new slots; the arguments stay as they are."""
    param, grad = np.asarray(param, np.float64), np.asarray(grad, np.float64)
    before = {name: np.asarray(slot, np.float64) for name, slot in slots.items()}
    slots = dict(before)
    options = {"factored": factored, "min_dim_size_to_factor": min_dim_size_to_factor}
    dims = treatment(param.shape, axes, rules, kinds=kinds, **options)

    def rms(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.mean(x**2, axis=dims.mean, keepdims=True))

    # beta_t = 1 - (t - offset + 1)^-0.8: 0 at the first step, so that the zeros of the fresh slots do not count.
    beta = 1.0 - float(step - step_offset + 1) ** -decay_rate

    # s = g^2 + eps1
    squared = grad**2 + epsilon1

    if dims.row:
        # R_t = beta R + (1 - beta) mean over columns of s;  C_t = beta C + (1 - beta) mean over rows of s
        slots["v_row"] = beta * slots["v_row"] + (1 - beta) * squared.mean(axis=dims.column)
        slots["v_col"] = beta * slots["v_col"] + (1 - beta) * squared.mean(axis=dims.row)
        # y = g * (R / mean over rows of R)^-1/2 * C^-1/2, that is g / sqrt(V) with V_ij = R_i C_j / mean(R)
        row = np.expand_dims(slots["v_row"], dims.column)
        column = np.expand_dims(slots["v_col"], dims.row)
        y = grad * (row / row.mean(axis=dims.row, keepdims=True)) ** -0.5 * column**-0.5
    else:
        # V_t = beta V + (1 - beta) s;  y = g * V^-1/2
        slots["v"] = beta * slots["v"] + (1 - beta) * squared
        y = grad * slots["v"] ** -0.5

    # y <- y / max(1, rms(y) / d)
    if clipping_threshold is not None:
        y = y / np.maximum(1.0, rms(y) / clipping_threshold)

    # alpha = lr * max(eps2, rms(param)), the second factor being at most max_parameter_scale
    scale = learning_rate
    if multiply_by_parameter_scale:
        scale = learning_rate * np.clip(rms(param), epsilon2, max_parameter_scale)

    # u = alpha * y
    subtrahend = scale * y

    # m_t = beta1 m + (1 - beta1) u;  u <- m_t
    if beta1 is not None:
        slots["m"] = subtrahend = beta1 * slots["m"] + (1 - beta1) * subtrahend

    # param <- (1 - wd) param - u, where wd may be scaled by a power of the learning rate
    new = param - subtrahend
    if weight_decay_rate is not None:
        power = 0.0 if weight_decay_rate_lr_exponent is None else weight_decay_rate_lr_exponent
        new = (1 - weight_decay_rate * learning_rate**power) * param - subtrahend

    # A parameter (each of those that BATCH dims stack) that would not be finite stays what it was.
    if skip_nan_updates:
        finite = np.isfinite(new) & np.isfinite(squared)
        sound = finite.all(axis=dims.mean, keepdims=True)
        new = np.where(sound, new, param)
        gone = {"v_row": dims.column, "v_col": dims.row}
        for name, slot in slots.items():
            if slot.shape != (1,):
                slots[name] = np.where(sound.squeeze(axis=gone.get(name, ())), slot, before[name])
    return new, slots


def clip_by_global_norm(grads: Sequence[np.ndarray], threshold: float) -> list[np.ndarray]:
    """The gradients, scaled so that the norm of all of them together is at most `threshold`."""
    norm = math.sqrt(sum(float((np.asarray(grad, np.float64) ** 2).sum()) for grad in grads))
    return [grad * (threshold / norm if norm > threshold else 1.0) for grad in grads]


def learning_rate(
    step: int,
    factors: str = "constant * linear_warmup * rsqrt_decay",
    base_learning_rate: float = 0.5,
    warmup_steps: int = 1000,
    decay_factor: float = 0.5,
    steps_per_decay: int = 20000,
    steps_per_cycle: int = 100000,
    step_offset: int = 0,
    min_learning_rate: float = 1e-8,
) -> float:
    """The product of the named factors at a step, at least `min_learning_rate`.

    learning_rate(500, "constant * linear_warmup", base_learning_rate=0.1, warmup_steps=1000) == 0.05
    """
    step = max(0, step - step_offset)
    rate = 1.0
    for factor in (name.strip() for name in factors.split("*")):
        match factor:
            case "constant":
                rate *= base_learning_rate
            case "linear_warmup":
                rate *= min(1.0, step / warmup_steps)
            case "linear_decay":
                rate *= base_learning_rate * min(step / warmup_steps, 1 + decay_factor * (warmup_steps - step))
            case "rsqrt_decay":
                rate /= math.sqrt(max(step, warmup_steps))
            case "rsqrt_normalized_decay":
                rate *= math.sqrt(warmup_steps) / math.sqrt(max(step, warmup_steps))
            case "decay_every":
                rate *= decay_factor ** (step // steps_per_decay)
            case "cosine_decay":
                # Cycles begin after the warm-up; during it the factor is 1.
                cycles = max(0.0, (step - warmup_steps) / steps_per_cycle)
                rate *= max(0.0, 0.5 * (1 + math.cos(math.pi * (cycles % 1.0))))
            case _:
                raise ValueError(f"unknown factor {factor!r} in {factors!r}")
    return max(rate, min_learning_rate)
