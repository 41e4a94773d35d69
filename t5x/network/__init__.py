"""One network for the T5 family, in Flax Linen."""

from t5x.network.attention import Mask, attend
from t5x.network.blocks import CACHES
from t5x.network.config import NetworkConfig, T5Config, TransformerConfig
from t5x.network.decoder_only import DecoderWrapper
from t5x.network.relative_position import RelativeBias
from t5x.network.transformer import Transformer

__all__ = [
    "CACHES",
    "DecoderWrapper",
    "Mask",
    "NetworkConfig",
    "RelativeBias",
    "T5Config",
    "Transformer",
    "TransformerConfig",
    "attend",
]
