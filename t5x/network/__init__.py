"""One network for the T5 family, in Flax Linen."""

from t5x.network.attention import Mask, attend
from t5x.network.config import T5Config
from t5x.network.relative_position import RelativeBias
from t5x.network.transformer import CACHES, Transformer

__all__ = ["CACHES", "Mask", "RelativeBias", "T5Config", "Transformer", "attend"]
