"""Networks of the T5 family, in Flax Linen."""

# ruff: noqa: F401

from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.network.attention import attend
from t5x.network.blocks import CACHES
from t5x.network.config import NetworkConfig, T5Config, TransformerConfig
from t5x.network.decoder_only import DecoderWrapper
from t5x.network.towers import LogitFactors
from t5x.network.transformer import Transformer
from t5x.network.variables import compute_params, default_dtype, initial_variables, is_ours, logical_axes
