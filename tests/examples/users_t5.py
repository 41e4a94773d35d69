"""A T5 as a T5X user writes it: from T5X's layers alone, with T5X's module names and call convention."""

import flax.linen as nn
import jax.numpy as jnp

from t5x.examples.t5 import layers
from t5x.examples.t5.network import T5Config


def drop(x, config, deterministic, broadcast_dims=(-2,)):
    return nn.Dropout(rate=config.dropout_rate, broadcast_dims=broadcast_dims)(x, deterministic=deterministic)


def attention(config, name):
    return layers.MultiHeadDotProductAttention(
        num_heads=config.num_heads,
        dtype=config.dtype,
        head_dim=config.head_dim,
        dropout_rate=config.dropout_rate,
        float32_logits=config.float32_attention_logits,
        name=name,
    )


def mlp(config):
    return layers.MlpBlock(
        intermediate_dim=config.mlp_dim,
        activations=config.mlp_activations,
        intermediate_dropout_rate=config.dropout_rate,
        dtype=config.dtype,
        name="mlp",
    )


def position_bias(config):
    return layers.RelativePositionBiases(
        num_buckets=32,
        max_distance=128,
        num_heads=config.num_heads,
        dtype=config.dtype,
        embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
        name="relpos_bias",
    )


class EncoderLayer(nn.Module):
    config: T5Config
    relative_embedding: nn.Module

    @nn.compact
    def __call__(self, inputs, encoder_mask, deterministic):
        cfg = self.config
        bias = self.relative_embedding(inputs.shape[-2], inputs.shape[-2], True)
        x = layers.LayerNorm(dtype=cfg.dtype, name="pre_attention_layer_norm")(inputs)
        x = attention(cfg, "attention")(x, x, encoder_mask, bias, deterministic=deterministic)
        x = drop(x, cfg, deterministic) + inputs
        y = layers.LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(x)
        return x + drop(mlp(cfg)(y, deterministic=deterministic), cfg, deterministic)


class DecoderLayer(nn.Module):
    config: T5Config
    relative_embedding: nn.Module

    @nn.compact
    def __call__(self, inputs, encoded, decoder_mask, cross_mask, deterministic, decode, max_decode_length):
        cfg = self.config
        length = max_decode_length if decode and max_decode_length else inputs.shape[-2]
        bias = self.relative_embedding(length, length, False)
        x = layers.LayerNorm(dtype=cfg.dtype, name="pre_self_attention_layer_norm")(inputs)
        x = attention(cfg, "self_attention")(x, x, decoder_mask, bias, deterministic=deterministic, decode=decode)
        x = drop(x, cfg, deterministic) + inputs
        y = layers.LayerNorm(dtype=cfg.dtype, name="pre_cross_attention_layer_norm")(x)
        y = attention(cfg, "encoder_decoder_attention")(y, encoded, cross_mask, deterministic=deterministic)
        y = drop(y, cfg, deterministic) + x
        z = layers.LayerNorm(dtype=cfg.dtype, name="pre_mlp_layer_norm")(y)
        return y + drop(mlp(cfg)(z, deterministic=deterministic), cfg, deterministic)


class Encoder(nn.Module):
    config: T5Config
    shared_embedding: nn.Module

    @nn.compact
    def __call__(self, tokens, encoder_mask, deterministic):
        cfg = self.config
        bias = position_bias(cfg)
        x = drop(self.shared_embedding(tokens.astype("int32")), cfg, deterministic)
        for i in range(cfg.num_encoder_layers):
            x = EncoderLayer(config=cfg, relative_embedding=bias, name=f"layers_{i}")(x, encoder_mask, deterministic)
        x = layers.LayerNorm(dtype=cfg.dtype, name="encoder_norm")(x)
        return drop(x, cfg, deterministic, broadcast_dims=())


class Decoder(nn.Module):
    config: T5Config
    shared_embedding: nn.Module

    @nn.compact
    def __call__(self, encoded, tokens, decoder_mask, cross_mask, deterministic, decode, max_decode_length):
        cfg = self.config
        bias = position_bias(cfg)
        y = drop(self.shared_embedding(tokens.astype("int32")), cfg, deterministic)
        for i in range(cfg.num_decoder_layers):
            y = DecoderLayer(config=cfg, relative_embedding=bias, name=f"layers_{i}")(
                y, encoded, decoder_mask, cross_mask, deterministic, decode, max_decode_length
            )
        y = drop(layers.LayerNorm(dtype=cfg.dtype, name="decoder_norm")(y), cfg, deterministic)
        if cfg.logits_via_embedding:
            return self.shared_embedding.attend(y) / jnp.sqrt(y.shape[-1])
        return layers.DenseGeneral(
            cfg.vocab_size, dtype=jnp.float32, kernel_axes=("embed", "vocab"), name="logits_dense"
        )(y)


class UsersTransformer(nn.Module):
    config: T5Config

    def setup(self):
        cfg = self.config
        self.shared_embedding = layers.Embed(
            num_embeddings=cfg.vocab_size,
            features=cfg.emb_dim,
            dtype=cfg.dtype,
            attend_dtype=jnp.float32,
            embedding_init=nn.initializers.normal(stddev=1.0),
            one_hot=True,
            name="token_embedder",
        )
        self.encoder = Encoder(config=cfg, shared_embedding=self.shared_embedding)
        self.decoder = Decoder(config=cfg, shared_embedding=self.shared_embedding)

    def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True):
        real = encoder_input_tokens > 0
        mask = layers.make_attention_mask(real, real, dtype=self.config.dtype)
        if encoder_segment_ids is not None:
            same = layers.make_attention_mask(
                encoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=self.config.dtype
            )
            mask = layers.combine_masks(mask, same)
        return self.encoder(encoder_input_tokens, mask, deterministic=not enable_dropout)

    def decode(
        self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
        decoder_segment_ids=None, decoder_positions=None, enable_dropout=True, decode=False, max_decode_length=None,
    ):  # fmt: skip
        dtype = self.config.dtype
        if decode:
            decoder_mask, queries = None, jnp.ones_like(decoder_target_tokens)
        else:
            decoder_mask = layers.make_decoder_mask(
                decoder_target_tokens, dtype=dtype, decoder_segment_ids=decoder_segment_ids
            )
            queries = decoder_target_tokens > 0
        cross_mask = layers.make_attention_mask(queries, encoder_input_tokens > 0, dtype=dtype)
        if encoder_segment_ids is not None:
            same = layers.make_attention_mask(decoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=dtype)
            cross_mask = layers.combine_masks(cross_mask, same)
        return self.decoder(
            encoded, decoder_input_tokens, decoder_mask, cross_mask, not enable_dropout, decode, max_decode_length
        )

    def __call__(
        self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
        decoder_segment_ids=None, encoder_positions=None, decoder_positions=None, *, enable_dropout=True, decode=False,
    ):  # fmt: skip
        encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout)
        return self.decode(
            encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids,
            decoder_segment_ids, decoder_positions, enable_dropout, decode,
        )  # fmt: skip
