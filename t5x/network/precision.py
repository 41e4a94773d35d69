"""Parameters in the dtype and layout that our networks compute with."""

from typing import Any

import jax
import jax.numpy as jnp

from t5x.kernels.ops import ops
from t5x.network.decoder_only import DecoderWrapper
from t5x.network.layers import join_kernels
from t5x.network.transformer import Transformer

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
