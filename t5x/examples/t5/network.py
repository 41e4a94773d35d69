"""T5X's name for the T5 network (`from t5x.examples.t5 import network` in gin files), and its parts.

`Transformer` is `t5x.network`'s. `Encoder`, `Decoder` and their layers are T5X's building blocks over `layers`, for
networks of your own; their parameters have the same names, so the same checkpoints load.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x._runtime.errors import UserError
from t5x.examples.t5 import layers
from t5x.network import T5Config, Transformer

__all__ = ["Decoder", "DecoderLayer", "Encoder", "EncoderLayer", "T5Config", "Transformer"]


def _norm(config: Any, name: str) -> layers.LayerNorm:
    return layers.LayerNorm(dtype=config.dtype, name=name)


def _dropout(config: Any, x: jax.Array, deterministic: bool) -> jax.Array:
    return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))(x, deterministic=deterministic)


def _attention(config: Any, name: str) -> layers.MultiHeadDotProductAttention:
    return layers.MultiHeadDotProductAttention(
        config.num_heads, config.head_dim, config.dtype, config.dropout_rate,
        float32_logits=getattr(config, "float32_attention_logits", False),
        scale_attn_logits=getattr(config, "scale_attn_logits", False), name=name,
    )  # fmt: skip


def _mlp(config: Any, x: jax.Array, deterministic: bool) -> jax.Array:
    """Return x with the MLP added."""
    y = _norm(config, "pre_mlp_layer_norm")(x)
    mlp = layers.MlpBlock(
        config.mlp_dim, config.mlp_activations, intermediate_dropout_rate=config.dropout_rate, dtype=config.dtype,
        name="mlp",
    )  # fmt: skip
    return x + _dropout(config, mlp(y, deterministic=deterministic), deterministic)


def _relative_biases(config: Any) -> layers.RelativePositionBiases:
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    buckets = getattr(config, "relative_attention_num_buckets", 32)
    distance = getattr(config, "relative_attention_max_distance", 128)
    return layers.RelativePositionBiases(buckets, distance, config.num_heads, config.dtype, init, name="relpos_bias")


class EncoderLayer(nn.Module):
    """Self-attention and an MLP.

    Attributes:
      relative_embedding: a `layers.RelativePositionBiases`; None makes one for this layer.
    """

    config: Any
    relative_embedding: nn.Module | None = None

    @nn.compact
    def __call__(
        self, inputs: jax.Array, encoder_mask: jax.Array | None = None, deterministic: bool = False
    ) -> jax.Array:
        cfg = self.config
        bias = (self.relative_embedding or _relative_biases(cfg))(inputs.shape[-2], inputs.shape[-2], True)
        x = _norm(cfg, "pre_attention_layer_norm")(inputs)
        x = _attention(cfg, "attention")(x, x, encoder_mask, bias, deterministic=deterministic)
        return _mlp(cfg, inputs + _dropout(cfg, x, deterministic), deterministic)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output unless `encoded` is None, and an MLP; see `EncoderLayer`."""

    config: Any
    relative_embedding: nn.Module | None = None

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        decoder_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        cfg = self.config
        length = max_decode_length if decode and max_decode_length else inputs.shape[-2]
        bias = (self.relative_embedding or _relative_biases(cfg))(length, length, False)
        x = _norm(cfg, "pre_self_attention_layer_norm")(inputs)
        x = _attention(cfg, "self_attention")(x, x, decoder_mask, bias, deterministic=deterministic, decode=decode)
        x = inputs + _dropout(cfg, x, deterministic)
        if encoded is not None:
            y = _norm(cfg, "pre_cross_attention_layer_norm")(x)
            cross = _attention(cfg, "encoder_decoder_attention")
            x = x + _dropout(cfg, cross(y, encoded, encoder_decoder_mask, deterministic=deterministic), deterministic)
        return _mlp(cfg, x, deterministic)


class Encoder(nn.Module):
    """Embeds tokens and runs the encoder's layers.

    Attributes:
      shared_embedding: a `layers.Embed`.
    """

    config: Any
    shared_embedding: nn.Module

    @nn.compact
    def __call__(
        self, encoder_input_tokens: jax.Array, encoder_mask: jax.Array | None = None, deterministic: bool = False
    ) -> jax.Array:
        cfg = self.config
        biases = _shared_biases(cfg)
        x = _dropout(cfg, self.shared_embedding(encoder_input_tokens.astype(jnp.int32)), deterministic)
        x = x.astype(cfg.dtype)
        for number in range(cfg.num_encoder_layers):
            x = EncoderLayer(cfg, biases, name=f"layers_{number}")(x, encoder_mask, deterministic)
        return nn.Dropout(cfg.dropout_rate)(_norm(cfg, "encoder_norm")(x), deterministic=deterministic)


class Decoder(nn.Module):
    """Runs the decoder's layers and computes logits; see `Encoder`. Without `encoded`, it is a language model.

    Attributes:
      shared_embedding: None makes a table for the decoder.
    """

    config: Any
    shared_embedding: nn.Module | None = None

    @nn.compact
    def __call__(
        self,
        encoded: jax.Array | None,
        decoder_input_tokens: jax.Array,
        decoder_positions: jax.Array | None = None,
        decoder_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        cfg = self.config
        biases = _shared_biases(cfg)
        init = nn.initializers.normal(1.0)
        embedding = self.shared_embedding or layers.Embed(
            cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype, attend_dtype=jnp.float32, embedding_init=init,
            name="token_embedder",
        )  # fmt: skip
        y = _dropout(cfg, embedding(decoder_input_tokens.astype(jnp.int32)), deterministic)
        y = y.astype(cfg.dtype)
        masks = (decoder_mask, encoder_decoder_mask)
        for number in range(getattr(cfg, "num_decoder_layers", None) or cfg.num_layers):
            layer = DecoderLayer(cfg, biases, name=f"layers_{number}")
            y = layer(y, encoded, *masks, deterministic, decode, max_decode_length)
        y = _dropout(cfg, _norm(cfg, "decoder_norm")(y), deterministic)
        if cfg.logits_via_embedding:
            return embedding.attend(y) / jnp.sqrt(y.shape[-1])
        axes = ("embed", "vocab")
        return layers.DenseGeneral(cfg.vocab_size, -1, jnp.float32, kernel_axes=axes, name="logits_dense")(y)


def _shared_biases(config: Any) -> nn.Module | None:
    """Return the position biases of a tower; None if every layer has its own."""
    if config.scan_layers:
        raise UserError("These parts of a network are unrolled: set scan_layers=False, or use Transformer.")
    return None if config.per_layer_relative_position_bias else _relative_biases(config)
