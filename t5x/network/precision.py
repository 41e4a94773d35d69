"""Our networks, and parameters as they compute with them."""

from typing import Any

import jax
import jax.numpy as jnp

from t5x.network.decoder_only import DecoderWrapper
from t5x.network.layers import join_kernels
from t5x.network.transformer import Transformer

_FLOAT32 = "rel_embedding"  # the tables of relative positions are added to logits, which are float32
_RESIDUAL = "embedding"  # rows of it begin the residual stream


def default_dtype() -> str:
    """Of the activations: processors are slow with bfloat16, and accelerators with float32."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def is_ours(module: Any) -> bool:
    """Whether it is exactly our network: what is built around it may use parameters and caches in other ways."""
    return type(module) in (Transformer, DecoderWrapper)


def compute_params(module: Any, params: Any) -> Any:
    """The parameters in the network's dtype, to which it would cast them at every use: the results are the same.

    A training run keeps float32, to add small updates to. On a GPU the kernels of gates are joined, as the network
    would do in every batch. Parameters of a network that is not ours stay as they are.
    """
    if not is_ours(module):
        return params
    config = module.config

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        name = getattr(path[-1], "key", None)
        stays = name == _FLOAT32 or leaf.dtype != jnp.float32
        return leaf if stays else leaf.astype(config.residual_dtype if name == _RESIDUAL else config.dtype)

    params = jax.tree_util.tree_map_with_path(cast, params)
    return join_kernels(params) if jax.default_backend() == "gpu" else params
