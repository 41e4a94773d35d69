"""What users' models change: all reflection on their classes, objects and networks."""

import dataclasses
import inspect
from typing import Any

from t5x.network import Transformer, is_ours


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a model or its network changes. Without any custom part, loss and decoding take the fastest path.

    Attributes:
      custom_network: the network is not exactly one of `t5x.network`, but e.g. a subclass.
      custom_logits: `compute_logits` or `_compute_logits` is overridden.
      custom_step: `_compute_logits_from_slice` is overridden.
      metrics_arguments: what `_compute_metrics` takes besides logits and targets, if it is overridden, else None.
      takes_row_index: the network keys dropout by `row_index`.
      takes_logits_of: `decode` of the network can compute chosen logits only.
      takes_mutables: `loss_fn` takes `flax_mutables`.
    """

    custom_network: bool
    custom_logits: bool
    custom_step: bool
    metrics_arguments: frozenset[str] | None
    takes_row_index: bool
    takes_logits_of: bool
    takes_mutables: bool


def hooks_of(model: Any) -> Hooks:
    """Return what a model changes, in its class or in the object.

    Called when a program is traced, and not cached, because users also set methods on objects.
    """
    module = getattr(model, "module", None)
    network: Any = type(module)
    own_setup = isinstance(module, Transformer) and network.setup is not Transformer.setup
    return Hooks(
        custom_network=not is_ours(module),
        custom_logits=_overrides(model, "compute_logits") or _overrides(model, "_compute_logits"),
        custom_step=_overrides(model, "_compute_logits_from_slice"),
        metrics_arguments=_metrics_arguments(model) if _overrides(model, "_compute_metrics") else None,
        takes_row_index=not own_setup and _accepts(network, "__call__", "row_index"),
        takes_logits_of=_accepts(network, "decode", "logits_of"),
        takes_mutables=_accepts(model, "loss_fn", "flax_mutables"),
    )


def _overrides(model: Any, method: str) -> bool:
    """Return whether a method is defined by the object or by a class outside of this package."""
    owner = next((cls for cls in type(model).__mro__ if method in vars(cls)), None)
    return method in vars(model) or (owner is not None and owner.__module__ != __package__)


def _metrics_arguments(model: Any) -> frozenset[str]:
    parameters = inspect.signature(model._compute_metrics).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return frozenset(("mask", "loss", "z_loss", "segment_ids") if is_open else parameters)


def _accepts(owner: Any, method: str, parameter: str) -> bool:
    function = getattr(owner, method, None)  # no method where a network has a field of this name
    return callable(function) and parameter in inspect.signature(function).parameters
