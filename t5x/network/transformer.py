"""The T5 encoder-decoder in Linen: T5X's call convention, parameter names and logical axes.

Layers are unrolled (`layers_0`, `layers_1` …) or scanned (one stack, `encoder/encoder` and `decoder/decoder`), with
the same initial values and the same dropout.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import initializers, partitioning

from t5x.errors import UserError
from t5x.network.attention import Mask, attend
from t5x.network.config import T5Config
from t5x.network.keys import Keys, dropout
from t5x.network.layers import MLP, Dense, Embed, RMSNorm, embed
from t5x.network.relative_position import RelativeBias, RelativePositionBias
from t5x.partitioning.logical import constrain

# What a decoding step carries: `cache` changes at every step; `cross_cache` (keys and values of the encoder's output)
# is computed once.
CACHES = ("cache", "cross_cache")


class Attention(nn.Module):
    """Multi-head attention, self or cross, with a key-value cache for incremental decoding."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array,
        *,
        mask: Mask,
        bias: RelativeBias | None,
        keys: Keys,
        decode: str | None = None,
    ) -> jax.Array:
        """x [batch, q, emb] attends to source [batch, k, emb]. `decode` is None, "self" or "cross"."""
        cfg = self.config
        width = cfg.num_heads * cfg.head_dim
        kernel_init = initializers.variance_scaling(1.0, "fan_in", "normal")

        # T5 has no 1/sqrt(head_dim) in the attention: its initial queries are that much smaller.
        query_init = initializers.variance_scaling(1.0 / cfg.head_dim, "fan_in", "normal")

        def heads(name: str, inputs: jax.Array, init=kernel_init) -> jax.Array:
            flat = Dense(width, ("embed", "joined_kv"), cfg.dtype, init, name=name)(inputs, keys.at(name))
            return constrain(
                flat.reshape(*flat.shape[:-1], cfg.num_heads, cfg.head_dim), "batch", "length", "heads", "kv"
            )

        query = heads("query", x, query_init)
        if decode == "cross":
            # Filled by the pass that creates the cache, from the encoder's output; read by every step after it.
            key = self.variable("cross_cache", "cached_key", lambda: heads("key", source)).value
            value = self.variable("cross_cache", "cached_value", lambda: heads("value", source)).value
        else:
            key, value = heads("key", source), heads("value", source)
        if decode == "self":
            key, value, mask = self._update_cache(key, value, mask)
        out = attend(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            keys=keys.at("weights"),
            dropout_rate=cfg.dropout_rate,
            float32_logits=cfg.float32_attention_logits,
            backend=cfg.attention_backend,
        )
        out = out.reshape(*x.shape[:-1], width)
        return Dense(x.shape[-1], ("joined_kv", "embed"), cfg.dtype, kernel_init, name="out")(out, keys.at("out"))

    def _update_cache(self, key: jax.Array, value: jax.Array, mask: Mask) -> tuple[jax.Array, jax.Array, Mask]:
        """Writes this step's key and value; the pass that creates the cache only sizes it."""
        exists = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros_like, key)
        cached_value = self.variable("cache", "cached_value", jnp.zeros_like, value)
        index = self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
        if not exists:
            return key, value, mask
        if key.shape[1] != 1:
            raise ValueError(f"a decoding step takes one token a row; got {key.shape[1]}")
        cached_key.value = jax.lax.dynamic_update_slice_in_dim(cached_key.value, key, index.value, axis=1)
        cached_value.value = jax.lax.dynamic_update_slice_in_dim(cached_value.value, value, index.value, axis=1)
        mask = Mask(position=index.value)
        index.value = index.value + 1
        return cached_key.value, cached_value.value, mask


def relative_bias(cfg: T5Config, keys: Keys, *, bidirectional: bool) -> RelativeBias:
    """The bias of the calling compact module, a tower or a layer, which owns the table as `relpos_bias`."""
    return RelativePositionBias(cfg.num_heads, bidirectional, name="relpos_bias")(keys.at("relpos_bias"))


class EncoderLayer(nn.Module):
    """`bias` is None where every layer has a table of its own."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, layer: jax.Array | int, keys: Keys, bias: RelativeBias | None, mask: Mask):
        cfg, keys = self.config, keys.layer(layer)
        bias = relative_bias(cfg, keys, bidirectional=True) if bias is None else bias
        x = constrain(x, "batch", "length", "embed")
        y = RMSNorm(cfg.dtype, name="pre_attention_layer_norm")(x)
        y = Attention(cfg, name="attention")(y, y, mask=mask, bias=bias, keys=keys.at("attention"))
        x = x + dropout(y, cfg.dropout_rate, keys.at("attention_out"))
        y = RMSNorm(cfg.dtype, name="pre_mlp_layer_norm")(x)
        y = MLP(cfg.mlp_dim, cfg.mlp_activations, cfg.dropout_rate, cfg.dtype, name="mlp")(y, keys.at("mlp"))
        return x + dropout(y, cfg.dropout_rate, keys.at("mlp_out")), None


class DecoderLayer(nn.Module):
    """`bias` is None where every layer has a table of its own."""

    config: T5Config
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        layer: jax.Array | int,
        keys: Keys,
        bias: RelativeBias | None,
        mask: Mask,
        encoded: jax.Array,
        cross_mask: Mask,
    ):
        cfg, keys = self.config, keys.layer(layer)
        bias = relative_bias(cfg, keys, bidirectional=False) if bias is None else bias
        x = constrain(x, "batch", "length", "embed")
        y = RMSNorm(cfg.dtype, name="pre_self_attention_layer_norm")(x)
        y = Attention(cfg, name="self_attention")(
            y, y, mask=mask, bias=bias, keys=keys.at("self_attention"), decode="self" if self.decode else None
        )
        x = x + dropout(y, cfg.dropout_rate, keys.at("self_attention_out"))
        y = RMSNorm(cfg.dtype, name="pre_cross_attention_layer_norm")(x)
        y = Attention(cfg, name="encoder_decoder_attention")(
            y,
            encoded,
            mask=cross_mask,
            bias=None,
            keys=keys.at("encoder_decoder_attention"),
            decode="cross" if self.decode else None,
        )
        x = x + dropout(y, cfg.dropout_rate, keys.at("cross_attention_out"))
        y = RMSNorm(cfg.dtype, name="pre_mlp_layer_norm")(x)
        y = MLP(cfg.mlp_dim, cfg.mlp_activations, cfg.dropout_rate, cfg.dtype, name="mlp")(y, keys.at("mlp"))
        return x + dropout(y, cfg.dropout_rate, keys.at("mlp_out")), None


def run_layers(
    layer_cls: type[nn.Module],
    cfg: T5Config,
    stack_name: str,
    num_layers: int,
    x: jax.Array,
    keys: Keys,
    *shared: Any,
    **fields: Any,
) -> jax.Array:
    """Runs `num_layers` layers over x inside the calling compact module, scanned or unrolled as configured.

    Args:
      shared: what every layer takes besides x, its number and its keys.
      fields: attributes of the layer module besides its config.
    """
    if cfg.remat_policy != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if cfg.remat_policy == "minimal" else None
        layer_cls = partitioning.remat(layer_cls, policy=policy, prevent_cse=not cfg.scan_layers)
    if cfg.scan_layers:
        stack = partitioning.scan_with_axes(
            layer_cls,
            variable_axes={"params": cfg.param_scan_axis, "intermediates": 0} | dict.fromkeys(CACHES, 0),
            split_rngs={"params": False, "dropout": False},  # keys are ours and are told apart by the layer number
            in_axes=(0,) + (nn.broadcast,) * (1 + len(shared)),
            length=num_layers,
            axis_name="layers",
            axes_collections=("params",),
        )
        x, _ = stack(cfg, name=stack_name, **fields)(x, jnp.arange(num_layers), keys, *shared)
        return x
    for i in range(num_layers):
        x, _ = layer_cls(cfg, name=f"layers_{i}", **fields)(x, i, keys, *shared)
    return x


class Encoder(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: Mask, keys: Keys) -> jax.Array:
        cfg = self.config
        bias = None if cfg.per_layer_relative_position_bias else relative_bias(cfg, keys, bidirectional=True)
        x = dropout(x, cfg.dropout_rate, keys.at("embedded"))
        x = run_layers(EncoderLayer, cfg, "encoder", cfg.num_encoder_layers, x, keys.at("layers"), bias, mask)
        x = RMSNorm(cfg.dtype, name="encoder_norm")(x)
        # T5 drops single positions here, unlike everywhere else.
        return dropout(x, cfg.dropout_rate, keys.at("encoded"), broadcast_length=False)


class Decoder(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(
        self, x: jax.Array, table: jax.Array, mask: Mask, encoded: jax.Array, cross_mask: Mask, keys: Keys, decode: bool
    ) -> jax.Array:
        cfg = self.config
        bias = None if cfg.per_layer_relative_position_bias else relative_bias(cfg, keys, bidirectional=False)
        x = dropout(x, cfg.dropout_rate, keys.at("embedded"))
        x = run_layers(
            DecoderLayer,
            cfg,
            "decoder",
            cfg.num_decoder_layers,
            x,
            keys.at("layers"),
            bias,
            mask,
            encoded,
            cross_mask,
            decode=decode,
        )
        x = RMSNorm(cfg.dtype, name="decoder_norm")(x)
        x = dropout(x, cfg.dropout_rate, keys.at("decoded")).astype(jnp.float32)
        if cfg.logits_via_embedding:
            logits = x @ table.T / np.sqrt(x.shape[-1])
        else:
            logits = Dense(cfg.vocab_size, ("embed", "vocab"), jnp.float32, name="logits_dense")(
                x, keys.at("logits_dense")
            )
        return constrain(logits, "batch", "length", "vocab")


class Transformer(nn.Module):
    """A T5 encoder-decoder.

    Example:
      >>> module = Transformer(T5Config(vocab_size=384, emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128))
      >>> variables = module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)
      >>> logits = module.apply(variables, tokens, tokens, tokens, enable_dropout=False)   # [batch, length, vocab]
    """

    config: T5Config

    def setup(self):
        cfg = self.config
        self.token_embedder = Embed(cfg.vocab_size, cfg.emb_dim, cfg.dtype)
        self.encoder = Encoder(cfg)
        self.decoder = Decoder(cfg)

    def encode(
        self,
        encoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        enable_dropout: bool = True,
        row_index: jax.Array | None = None,
    ) -> jax.Array:
        """int [batch, inputs] -> [batch, inputs, emb]."""
        keys = self._keys(encoder_input_tokens, enable_dropout, row_index)
        real = encoder_input_tokens > 0
        if encoder_segment_ids is None:
            mask = Mask(key_segments=real.astype(jnp.int32))
        else:
            mask = Mask(key_segments=jnp.where(real, encoder_segment_ids, 0), query_segments=encoder_segment_ids)
        x = embed(self.token_embedder(keys.at("token_embedder")), encoder_input_tokens, self.config.dtype)
        return self.encoder(x, mask, keys.at("encoder"))

    def decode(
        self,
        encoded: jax.Array,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        decoder_target_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        enable_dropout: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
        row_index: jax.Array | None = None,
    ) -> jax.Array:
        """Logits float32 [batch, targets, vocab].

        With `decode`, the first call creates the caches, sized for the length of `decoder_input_tokens`, and fills
        `cross_cache` from `encoded`; every later call takes one token a row and advances `cache`.
        """
        del decoder_positions, max_decode_length  # relative positions need neither; the cache has its length
        if decode and (encoder_segment_ids is not None or decoder_segment_ids is not None):
            raise UserError("Packed examples cannot be decoded incrementally: set pack=False for inference.")
        keys = self._keys(decoder_input_tokens, enable_dropout, row_index)
        sources = encoder_input_tokens > 0
        if decoder_segment_ids is not None:
            targets = jnp.where(decoder_target_tokens > 0, decoder_segment_ids, 0)
            mask = Mask(key_segments=targets, query_segments=decoder_segment_ids, causal=True)
            cross_mask = Mask(
                key_segments=jnp.where(sources, encoder_segment_ids, 0), query_segments=decoder_segment_ids
            )
        else:
            # While decoding nothing after the current position is in the cache, and nothing before it is padding.
            targets = None if decode else (decoder_target_tokens > 0).astype(jnp.int32)
            mask = Mask(key_segments=targets, causal=True)
            cross_mask = Mask(key_segments=sources.astype(jnp.int32))
        table = self.token_embedder(keys.at("token_embedder"))
        x = embed(table, decoder_input_tokens, self.config.dtype)
        return self.decoder(x, table, mask, encoded, cross_mask, keys.at("decoder"), decode)

    def __call__(
        self,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        decoder_target_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        encoder_positions: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        *,
        enable_dropout: bool = True,
        decode: bool = False,
        row_index: jax.Array | None = None,
    ) -> jax.Array:
        """Logits float32 [batch, targets, vocab] under teacher forcing.

        Args:
          encoder_segment_ids, decoder_segment_ids: int, which example of a packed row a token belongs to.
          encoder_positions, decoder_positions: accepted for T5X's convention; T5 has no absolute positions.
          row_index: int [batch], rows of the global batch, which key dropout; 0, 1, 2 … by default.
        """
        del encoder_positions
        encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout, row_index)
        return self.decode(
            encoded,
            encoder_input_tokens,
            decoder_input_tokens,
            decoder_target_tokens,
            encoder_segment_ids,
            decoder_segment_ids,
            decoder_positions,
            enable_dropout,
            decode,
            row_index=row_index,
        )

    def _keys(self, tokens: jax.Array, enable_dropout: bool, row_index: jax.Array | None) -> Keys:
        enable_dropout = enable_dropout and self.config.dropout_rate > 0.0
        return Keys.of(self, batch=tokens.shape[0], enable_dropout=enable_dropout, rows=row_index)
