"""Initial variables of a network."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.partitioning import AxisMetadata

from t5x.kernels.choice import ops
from t5x.network.decoder_only import DecoderWrapper
from t5x.network.layers import join_kernels
from t5x.network.transformer import Transformer
from t5x.partitioning.logical import constrain

_FLOAT32 = "rel_embedding"  # relative position tables are added to logits, which are float32
_RESIDUAL = "embedding"  # its rows start the residual stream


def default_dtype() -> str:
    """Return the default dtype of activations on the devices of the active mesh, or on JAX's default device.

    bfloat16 is slow on CPUs, float32 is slow on accelerators.
    """
    return ops().default_dtype


def is_ours(module: Any) -> bool:
    """Return whether a module is exactly one of our networks; others may use parameters and caches differently."""
    return type(module) in (Transformer, DecoderWrapper)


def compute_params(module: Any, params: Any) -> Any:
    """Cast parameters to the network's dtype, as the network would at every use; results are identical.

    Not for training, which needs float32 to accumulate small updates. Where the network would fuse the gate
    kernels in every batch, they are fused too. Parameters of other networks are returned unchanged.
    """
    if not is_ours(module):
        return params
    config = module.config

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        name = getattr(path[-1], "key", None)
        stays = name == _FLOAT32 or leaf.dtype != jnp.float32
        return leaf if stays else leaf.astype(config.residual_dtype if name == _RESIDUAL else config.dtype)

    params = jax.tree_util.tree_map_with_path(cast, params)
    return join_kernels(params) if ops().joins_gates else params


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
