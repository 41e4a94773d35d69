"""NaN and infinity: the step at which they appeared, and the affected gradients and parameters."""

import dataclasses
import math
import re
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
    "Usual remedies: a lower learning rate or a longer warm-up; clipping (adafactor.Adafactor."
    "global_norm_clip_threshold = 1.0); leaving out such updates (adafactor.Adafactor.skip_nan_updates = True); "
    "float32 activations (dtype of the network's config)."
)


def _parts(key: str) -> tuple[str, int]:
    name, number = re.fullmatch(r"(.*?)(?:_(\d+))?", key).groups()
    return name, int(number or 0)


def in_network_order(names: Iterable[str]) -> list[str]:
    """Sort names of parameters, with `/`, by the order in which a T5 uses them; unknown modules come last.

    >>> in_network_order(["decoder/layers_0/mlp/wi_0/kernel", "encoder/layers_10/mlp/wo/kernel",
    ...                   "encoder/layers_9/mlp/wo/kernel", "token_embedder/embedding"])[1]
    'encoder/layers_9/mlp/wo/kernel'
    """

    def place(key: str) -> tuple[int, str, int]:
        name, number = _parts(key)
        return _RANK.get(name, len(_RANK)), name, number

    return sorted(names, key=lambda name: [place(key) for key in name.split("/")])


def gradient_metrics(gradients: Any) -> Metrics:
    """Return `gradient_norm` and, for `diagnose`, the first non-finite gradient. A pure function."""
    squares = {name: jnp.sum(jnp.square(gradient)) for name, gradient in flatten(gradients).items()}
    bad = ~jnp.isfinite(jnp.stack([squares[name] for name in _backwards(squares)]))
    first = jnp.where(jnp.any(bad), jnp.argmax(bad) + 1, 0)
    norm = jnp.sqrt(sum(squares.values()))
    return {"gradient_norm": AveragePerStep(norm), FIRST_BAD_GRADIENT: AveragePerStep(first)}


def find_nonfinite(params: Any) -> list[str]:
    """Return the names of arrays with a NaN or infinity, in network order. All processes must call it."""
    finite = jax.device_get(_all_finite(params))
    return in_network_order(name for name, fine in flatten(finite).items() if not fine)


@jax.jit
def _all_finite(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree)


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
    value = lambda metrics, name: float(metrics[name].compute()) if name in metrics else 0.0
    fine = lambda metrics: all(math.isfinite(value(metrics, name)) for name in ("loss", "gradient_norm"))
    names = flatten(params)
    at = next((i for i, metrics in enumerate(steps) if not fine(metrics)), None)
    step = None if at is None else last_step - len(steps) + 1 + at
    if at is None:
        told = f"The loss was not finite before step {last_step - len(steps) + 1}."
    elif not math.isfinite(loss := value(steps[at], "loss")):
        told = f"The loss is {loss} at step {step}, the first that is not finite"
        if at > 0:
            before, norm = value(steps[at - 1], "loss"), value(steps[at - 1], "gradient_norm")
            told += f"; the step before it had a loss of {before:.6g} and a gradient norm of {norm:.4g}"
        told += "."
    else:
        gradient = _gradient(names if trained is None else flatten(trained), int(value(steps[at], FIRST_BAD_GRADIENT)))
        told = f"At step {step} the loss was {loss:.6g}, but {gradient} was not finite."
    bad = find_nonfinite(params)
    told += f" {_told_of(bad, len(names), last_step)}" if bad else " All parameters are still finite."
    return Diagnosis(step, bad, f"{told} {_REMEDIES}")


def bad_parameters(params: Any, last_step: int) -> str | None:
    """Return a message about non-finite parameters, or None if all are finite. All processes must call it."""
    bad = find_nonfinite(params)
    return f"{_told_of(bad, len(flatten(params)), last_step)} {_REMEDIES}" if bad else None


def _told_of(bad: Sequence[str], count: int, last_step: int) -> str:
    if len(bad) == count:
        return f"By step {last_step} none of the {count} parameters is finite any more."
    return f"By step {last_step}, {len(bad)} of {count} parameters are not finite; the first is {bad[0]}."


def _gradient(names: Collection[str], number: int) -> str:
    if number == 0:
        return "the gradient"
    known = all(_parts(key)[0] in _RANK for name in names for key in name.split("/")[:-1])
    nearest = " (of those that were not, the nearest to the loss)" if known else ""
    return f"the gradient of {_backwards(names)[number - 1]}{nearest}"


def _backwards(names: Iterable[str]) -> list[str]:
    return in_network_order(names)[::-1]
