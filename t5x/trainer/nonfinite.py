"""NaN and infinity: the step at which they appeared, and the affected gradients and parameters."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x.checkpoints.tree import flatten
from t5x.metrics.accumulators import AveragePerStep, Metrics

# Per step: 0, or the position, counted from 1 at the loss backwards, of the first non-finite gradient.
FIRST_BAD_GRADIENT = "first_nonfinite_gradient"

# Sibling modules, in the order in which a T5 runs them.
_ORDER = (
    "token_embedder", "relpos_bias", "encoder", "layers", "pre_attention_layer_norm", "attention",
    "pre_self_attention_layer_norm", "self_attention", "pre_cross_attention_layer_norm", "encoder_decoder_attention",
    "pre_mlp_layer_norm", "mlp", "encoder_norm", "decoder", "decoder_norm", "logits_dense", "query", "key", "value",
    "out", "wi", "wo",
)  # fmt: skip
_RANK = {name: rank for rank, name in enumerate(_ORDER)}

_REMEDIES = (
    "Usual remedies: a lower learning rate or a longer warmup; clipping (adafactor.Adafactor."
    "global_norm_clip_threshold = 1.0); skipping such updates (adafactor.Adafactor.skip_nan_updates = True); float32 "
    "activations (dtype of the network's config)."
)


def _split_number(key: str) -> tuple[str, int]:
    name, underscore, number = key.rpartition("_")
    return (name, int(number)) if underscore and number.isdecimal() else (key, 0)


def in_network_order(names: Iterable[str]) -> list[str]:
    """Sort names of parameters, with `/`, by the order in which a T5 uses them; unknown modules come last.

    >>> in_network_order(["decoder/layers_0/mlp/wi_0/kernel", "encoder/layers_10/mlp/wo/kernel",
    ...                   "encoder/layers_9/mlp/wo/kernel", "token_embedder/embedding"])[1]
    'encoder/layers_9/mlp/wo/kernel'
    """

    def rank(key: str) -> tuple[int, str, int]:
        name, number = _split_number(key)
        return _RANK.get(name, len(_RANK)), name, number

    return sorted(names, key=lambda name: [rank(key) for key in name.split("/")])


def gradient_metrics(gradients: Any) -> Metrics:
    """Return `gradient_norm` and, for `diagnose`, the first non-finite gradient. A pure function."""
    squares = {name: jnp.sum(jnp.square(gradient)) for name, gradient in flatten(gradients).items()}
    bad = ~jnp.isfinite(jnp.stack([squares[name] for name in _backwards(squares)]))
    first = jnp.where(jnp.any(bad), jnp.argmax(bad) + 1, 0)
    norm = jnp.sqrt(sum(squares.values()))
    return {"gradient_norm": AveragePerStep(total=norm), FIRST_BAD_GRADIENT: AveragePerStep(total=first)}


def find_nonfinite(params: Any) -> list[str]:
    """Return the names of arrays with a NaN or infinity, in network order. All processes must call it."""
    finite = jax.device_get(_all_finite(params))
    return in_network_order(name for name, fine in flatten(finite).items() if not fine)


@jax.jit
def _all_finite(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree)


def is_finite(step: Metrics) -> bool:
    """Return whether the loss and the gradient of a step are finite."""
    return all(math.isfinite(_value(step, name)) for name in ("loss", "gradient_norm"))


def _value(step: Metrics, name: str) -> float:
    return float(step[name].compute()) if name in step else 0.0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a NaN or infinity.

    Attributes:
      step: the first step with a non-finite loss or gradient; None if it was before the steps that are still known.
      parameters: the non-finite parameters, in network order. If there are any, the run cannot recover.
      message: a description for the user, with remedies.
    """

    step: int | None
    parameters: list[str]
    message: str


def diagnose(steps: Sequence[Metrics], last_step: int, params: Any, trained: Any = None) -> Diagnosis:
    """Find the cause of a non-finite loss or gradient.

    Args:
      steps: metrics of every step since the last that is known to be finite, up to `last_step`.
      last_step: number of the last of them; the first step of a model is 1.
      params: the current parameters.
      trained: the subset of them whose gradients were passed to `gradient_metrics`; None is all.
    """
    steps = jax.device_get(list(steps))
    names = flatten(params)
    first = last_step - len(steps) + 1
    index = next((i for i, metrics in enumerate(steps) if not is_finite(metrics)), None)
    step = None if index is None else first + index
    if index is None:
        cause = f"The loss was not finite before step {first}."
    elif math.isfinite(loss := _value(steps[index], "loss")):
        gradient = _describe_gradient(flatten(params if trained is None else trained), steps[index])
        cause = f"At step {step} the loss was {loss:.6g}, but {gradient} was not finite."
    else:
        cause = f"The loss is {loss} at step {step}, the first that is not finite."
        if index > 0:
            before, norm = (_value(steps[index - 1], name) for name in ("loss", "gradient_norm"))
            cause += f" Step {first + index - 1} had a loss of {before:.6g} and a gradient norm of {norm:.4g}."
    bad = find_nonfinite(params)
    effect = _describe_parameters(bad, len(names), last_step) if bad else "All parameters are still finite."
    return Diagnosis(step, bad, f"{cause} {effect} {_REMEDIES}")


def bad_parameters(params: Any, last_step: int) -> str | None:
    """Return a message about non-finite parameters, or None if all are finite. All processes must call it."""
    bad = find_nonfinite(params)
    return f"{_describe_parameters(bad, len(flatten(params)), last_step)} {_REMEDIES}" if bad else None


def _describe_parameters(bad: Sequence[str], count: int, last_step: int) -> str:
    if len(bad) == count:
        return f"After step {last_step}, none of the {count} parameters is finite."
    return f"After step {last_step}, {len(bad)} of {count} parameters are not finite; the first is {bad[0]}."


def _describe_gradient(names: Collection[str], step: Metrics) -> str:
    number = int(_value(step, FIRST_BAD_GRADIENT))
    if number == 0:
        return "the gradient"
    is_t5 = all(_split_number(key)[0] in _RANK for name in names for key in name.split("/")[:-1])
    nearest = " (the nearest to the loss of those that were not)" if is_t5 else ""
    return f"the gradient of {_backwards(names)[number - 1]}{nearest}"


def _backwards(names: Iterable[str]) -> list[str]:
    return in_network_order(names)[::-1]
