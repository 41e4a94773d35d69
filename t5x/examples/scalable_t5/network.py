"""T5X's name for the T5 that scans over its layers (`from t5x.examples.scalable_t5 import network` in gin files)."""

# ruff: noqa: F401

import dataclasses

from t5x import network
from t5x.examples.t5.network import Decoder, DecoderLayer, Encoder, EncoderLayer
from t5x.network import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(network.T5Config):
    """T5Config with scalable_t5's defaults: layers stacked and scanned, each with a relative-position table."""

    scan_layers: bool = True
    per_layer_relative_position_bias: bool = True
