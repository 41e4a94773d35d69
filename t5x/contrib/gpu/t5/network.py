"""T5X's name for NVIDIA's copy of the T5 network: ours, which may also scale attention logits."""

# ruff: noqa: F401

import dataclasses

from t5x import network
from t5x.examples.t5.network import Decoder, DecoderLayer, Encoder, EncoderLayer
from t5x.network import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(network.T5Config):
    """A T5Config with `scale_attn_logits`: divide queries by sqrt(head_dim).

    T5 initializes the query kernel smaller by that factor instead. Adam needs the division; with Adafactor, both are
    equivalent.
    """

    scale_attn_logits: bool = False
