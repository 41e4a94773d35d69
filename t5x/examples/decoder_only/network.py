"""T5X's name for the decoder-only network (`from t5x.examples.decoder_only import network` in gin files)."""

# ruff: noqa: F401

from t5x.examples.t5.network import Decoder, DecoderLayer
from t5x.network import DecoderWrapper, TransformerConfig
