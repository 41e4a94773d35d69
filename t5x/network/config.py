"""Configuration of the networks: the fields they share, and those of each network."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x._runtime.errors import UserError
from t5x.kernels.ops import ACTIVATIONS

REMAT_POLICIES = ("none", "minimal", "full")
_CHOICES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "matmul_dtype": (None, "fp8"),
    "remat_policy": REMAT_POLICIES,
    "param_scan_axis": (0, 1),
}
_MAX_DISTANCE = 65_536  # kernels keep the bias up to this distance in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Shape and numerics shared by all networks of the family.

    Attributes:
      vocab_size: rows of the embedding table; at least the vocabulary's size, usually padded to a multiple of 128.
      dtype: dtype of the activations. Parameters are always float32. Matmuls, including the logits, use this dtype and
        accumulate in float32; softmax, norms and the loss are float32. With float16 the residual stream is float32
        as well, because T5's activations exceed the range of float16.
      matmul_dtype: None multiplies in `dtype`. `fp8` trains with the layers' matmuls in 8-bit floating point (NVIDIA
        Hopper and newer; `network/fp8.py`); logits, attention, evaluation and inference stay in `dtype`.
      emb_dim: width of the residual stream.
      num_heads, head_dim: attention heads and their width; their product need not be `emb_dim`.
      mlp_activations: one name gives a plain MLP, several are multiplied (a gated MLP).
      dropout_rate: 0 disables dropout.
      logits_via_embedding: tie the logits to the embedding table, scaled by 1/sqrt(emb_dim).
      float32_attention_logits: multiply queries and keys in float32 whatever `dtype` is.
      scan_layers: stack the layers and scan over them: compiles faster, often runs slower. Initial values and dropout
        do not depend on it.
      param_scan_axis: position of the layer axis in a stacked parameter.
      remat_policy: what the backward pass recomputes: `none`, `minimal` (everything except matmuls) or `full`.
      per_layer_relative_position_bias: a bias table in every layer (umT5) instead of one per tower.
      relative_attention_num_buckets, relative_attention_max_distance: rows of a bias table, and the distance from which
        on all keys share the last one. All T5 models of Google have 32 and 128.
      attention_backend: `auto` (the fastest that is correct for device, dtype and mask; logged once), `xla`, `pallas`
        (t5x's fused kernel, for bfloat16 on NVIDIA GPUs and TPUs and float16 on NVIDIA GPUs), or `cudnn` (also fused;
        padding only at the end of rows, no packed rows, no prefix).
    """

    vocab_size: int
    dtype: DTypeLike = "float32"
    matmul_dtype: str | None = None
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
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    attention_backend: str = "auto"

    @property
    def residual_dtype(self) -> DTypeLike:
        """Dtype of the residual stream."""
        return "float32" if self.dtype == "float16" else self.dtype

    def __post_init__(self):
        cls = type(self).__name__
        if isinstance(self.mlp_activations, str) or not isinstance(self.mlp_activations, Sequence):
            raise UserError(f"{cls}.mlp_activations is {self.mlp_activations!r}: it must be a list of names.")
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        if not isinstance(self.dtype, str):
            with contextlib.suppress(TypeError, ValueError):
                object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"{cls}.{name} is {value!r}; known are {', '.join(map(str, choices))}.")
        if self.matmul_dtype and self.dtype == "float16":
            raise UserError(f"{cls}.matmul_dtype is 'fp8': set {cls}.dtype to 'bfloat16', not to 'float16'.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name.endswith("_token_id") else 1
            if field.type is int and field.name != "param_scan_axis" and (type(value) is not int or value < low):
                raise UserError(f"{cls}.{field.name} is {value!r}: it must be a whole number of at least {low}.")
            if field.type in (bool, str) and not isinstance(value, field.type):
                raise UserError(f"{cls}.{field.name} is {value!r}: it must be a {field.type.__name__}.")
        names = tuple(ACTIVATIONS)  # a value from a file may not be hashable
        if unknown := [a for a in self.mlp_activations if a not in names]:
            raise UserError(f"{cls}.mlp_activations names {unknown[0]!r}; known are {', '.join(names)}.")
        if not self.mlp_activations:
            raise UserError(f'{cls}.mlp_activations is empty: T5 1.0 has ("relu",), T5 1.1 ("gelu", "linear").')
        if not isinstance(self.dropout_rate, int | float) or not 0 <= self.dropout_rate < 1:
            raise UserError(f"{cls}.dropout_rate is {self.dropout_rate}: it must be at least 0 and below 1.")
        if (buckets := self.relative_attention_num_buckets) < 4:  # each direction has near and far ones
            raise UserError(f"{cls}.relative_attention_num_buckets is {buckets}: it must be at least 4.")
        if not buckets // 2 < (distance := self.relative_attention_max_distance) <= _MAX_DISTANCE:
            raise UserError(
                f"{cls}.relative_attention_max_distance is {distance}: it must be above {buckets // 2}, half of the "
                f"buckets, and at most {_MAX_DISTANCE:,}."
            )


TOKEN_IDS = ("decoder_start_token_id", "pad_token_id", "eos_token_id", "forced_bos_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(NetworkConfig):
    """An encoder-decoder.

    T5 1.0 is `mlp_activations=("relu",), logits_via_embedding=True`; T5 1.1, mT5 and ByT5 are `("gelu", "linear")` and
    untied; umT5 also has `per_layer_relative_position_bias`.

    Attributes:
      decoder_start_token_id: the decoder's first input.
      pad_token_id: padding of inputs and targets, which attention and the loss ignore.
      eos_token_id: the tokens that end an output; empty means the vocabulary's EOS, which training targets always have.
      forced_bos_token_id: the first token of every generated output; None leaves it to the network.
    """

    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    decoder_start_token_id: int = 0
    pad_token_id: int = 0
    eos_token_id: Sequence[int] = ()
    forced_bos_token_id: int | None = None

    def __post_init__(self):
        super().__post_init__()
        eos = self.eos_token_id
        object.__setattr__(self, "eos_token_id", tuple(eos) if isinstance(eos, list | tuple) else (eos,))
        for name in TOKEN_IDS:
            value = getattr(self, name)
            for token in value if isinstance(value, tuple) else () if value is None else (value,):
                if type(token) is not int or not 0 <= token < self.vocab_size:
                    raise UserError(
                        f"T5Config.{name} is {str(value)[:80]}: the model's tokens are 0 to {self.vocab_size - 1}."
                    )
        if self.pad_token_id in self.eos_token_id:
            raise UserError(
                f"T5Config.pad_token_id and eos_token_id are both {self.pad_token_id}: padding must be another token."
            )


# {field: its only value in T5X}
FIXED_IN_T5X = {
    field.name: field.default
    for field in dataclasses.fields(T5Config)
    if field.name in TOKEN_IDS or field.name.startswith("relative_attention_")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(NetworkConfig):
    """A decoder-only network: a causal or a prefix language model."""

    num_layers: int = 6
