"""The configuration of the network: what the members of the family share, and what each adds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from t5x.errors import UserError

ACTIVATIONS = ("gelu", "linear", "relu", "sigmoid", "silu", "tanh")
REMAT_POLICIES = ("none", "minimal", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Shape and numerics that every member of the family has.

    Attributes:
      vocab_size: rows of the embedding table; at least the vocabulary's size, usually padded to a multiple of 128.
      dtype: of the activations. Parameters are float32 always. Products, also those of the logits, are of this type
        and summed up in float32; softmax, norms and the loss are float32. With float16 the residual stream is float32
        too: T5's outgrows float16's range.
      emb_dim: width of the residual stream.
      num_heads, head_dim: attention heads and their width; their product need not be `emb_dim`.
      mlp_activations: one name is a plain MLP, several are multiplied (a gated MLP).
      dropout_rate: 0 switches dropout off.
      logits_via_embedding: tied logits, scaled by 1/sqrt(emb_dim).
      float32_attention_logits: multiply queries and keys in float32 whatever `dtype` is.
      scan_layers: hold the layers stacked and scan over them: compiles faster, often runs slower. Initial values and
        dropout do not depend on it.
      param_scan_axis: where the layer axis stands in a stacked parameter.
      remat_policy: what the backward pass recomputes: `none`, `minimal` (all but matrix products) or `full`.
      per_layer_relative_position_bias: a bias table in every layer (umT5) instead of one for each tower.
      attention_backend: `auto` (the fastest that is right for device, dtype and mask; a slow one says so), `xla`, or
        `cudnn` (NVIDIA GPUs; bfloat16 or float16; padding at the end of rows alone, no packed rows, no prefix).
    """

    vocab_size: int
    dtype: Any = "float32"
    emb_dim: int = 512
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str] = ("relu",)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False
    scan_layers: bool = False
    param_scan_axis: int = 1
    remat_policy: str = "none"
    per_layer_relative_position_bias: bool = False
    attention_backend: str = "auto"

    @property
    def residual_dtype(self) -> str:
        """Of what the layers add up."""
        return "float32" if self.dtype == "float16" else self.dtype

    def __post_init__(self):
        cls = type(self).__name__
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        try:
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        except TypeError:
            raise UserError(f"{cls}.dtype is {self.dtype!r}: use 'float32', 'bfloat16' or 'float16'.") from None
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name != "param_scan_axis" and (type(value) is not int or value < 1):
                raise UserError(f"{cls}.{field.name} is {value!r}: it must be a whole number of at least 1.")
        if unknown := [a for a in self.mlp_activations if a not in ACTIVATIONS]:
            raise UserError(f"{cls}.mlp_activations names {unknown[0]!r}; known are {', '.join(ACTIVATIONS)}.")
        if not self.mlp_activations:
            raise UserError(f'{cls}.mlp_activations is empty: T5 1.0 has ("relu",), T5 1.1 ("gelu", "linear").')
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"{cls}.dropout_rate is {self.dropout_rate}: it must be at least 0 and below 1.")
        if self.remat_policy not in REMAT_POLICIES:
            raise UserError(f"{cls}.remat_policy is {self.remat_policy!r}; known are {', '.join(REMAT_POLICIES)}.")
        if self.param_scan_axis not in (0, 1):
            raise UserError(f"{cls}.param_scan_axis is {self.param_scan_axis}: it must be 0 or 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(NetworkConfig):
    """An encoder-decoder.

    T5 1.0 is `mlp_activations=("relu",), logits_via_embedding=True`; T5 1.1, mT5 and ByT5 are `("gelu", "linear")` and
    untied; umT5 has `per_layer_relative_position_bias` besides.
    """

    num_encoder_layers: int = 6
    num_decoder_layers: int = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(NetworkConfig):
    """A decoder alone: a causal or a prefix language model."""

    num_layers: int = 6
