"""Initial variables of a network."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
from flax.linen.partitioning import AxisMetadata

from t5x.network.precision import is_ours
from t5x.partitioning.logical import constrain

_TOWERS = ("encoder", "decoder")  # a stack of scanned layers has the name of its tower


def initial_variables(module: nn.Module, rng: jax.Array, *tokens: jax.Array) -> Mapping[str, Any]:
    """Return `params`, and their logical axes in `params_axes`.

    For our networks with unrolled layers, the same network with scanned layers is initialized and then unstacked.
    `Keys` gives it the same values, and only one layer per tower is compiled.

    Args:
      tokens: arguments of the module's call.
    """
    if not is_ours(module) or module.config.scan_layers:
        return module.init({"params": rng}, *tokens, enable_dropout=False)
    config = dataclasses.replace(module.config, scan_layers=True, param_scan_axis=0, remat_policy="none")
    variables = flax.core.unfreeze(module.clone(config=config).init({"params": rng}, *tokens, enable_dropout=False))
    for tower in _TOWERS:
        if tower in variables["params"]:
            _unstack(variables["params"][tower], variables["params_axes"][tower], tower)
    return variables


def _unstack(params: dict[str, Any], params_axes: dict[str, Any], stack: str) -> None:
    """Replace the entry `stack`, whose arrays have the layer axis first, by one entry per layer."""
    arrays, metadata = params.pop(stack), params_axes.pop(stack)
    axes = logical_axes({"params": arrays, "params_axes": metadata})
    # The stack is sharded like its layers: no device ever holds all of it.
    arrays = jax.tree.map(lambda x, names: constrain(x, None, *names[1:]), arrays, axes)

    def without_layers(metadata: AxisMetadata) -> AxisMetadata:
        return AxisMetadata(names=metadata.names[1:])

    for i in range(jax.tree.leaves(arrays)[0].shape[0]):
        params[f"layers_{i}"] = jax.tree.map(lambda x, i=i: x[i], arrays)
        params_axes[f"layers_{i}"] = jax.tree.map(
            without_layers, metadata, is_leaf=lambda x: isinstance(x, AxisMetadata)
        )


def logical_axes(variables: Mapping[str, Any]) -> Any:
    """Return the logical axes of every parameter, as recorded in `params_axes`; None for those not recorded."""
    recorded = variables.get("params_axes", {})

    def axes_of(path, _):
        *parents, name = (key.key for key in path)
        scope = recorded
        for parent in parents:
            scope = scope.get(parent, {})
        axes = scope.get(f"{name}_axes")
        return None if axes is None else tuple(axes.names)

    return jax.tree_util.tree_map_with_path(axes_of, variables["params"])
