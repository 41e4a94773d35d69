"""The encoder, and the decoder with or without cross-attention."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x.kernels.attention_inputs import Mask
from t5x.kernels.choice import ops
from t5x.network.blocks import DecoderLayer, EncoderLayer, prepare_attention, relative_bias, run_layers
from t5x.network.config import NetworkConfig
from t5x.network.keys import Keys, dropout
from t5x.network.layers import Embed, Kernel, RMSNorm, embed, lookup, project
from t5x.partitioning.logical import constrain

ROW_OFFSETS = "row_offsets"  # cache entry, see `Mask`; `decoding.beam` knows it by this name


@flax.struct.dataclass
class LogitFactors:
    """Logits before the final matmul: `scale` * (hidden @ kernel).

    Attributes:
      hidden: [batch, length, emb], in the network's dtype.
      kernel: [emb, vocab], in the dtype of the parameter.
    """

    hidden: jax.Array
    kernel: jax.Array
    scale: float = flax.struct.field(pytree_node=False)


class Encoder(nn.Module):
    config: NetworkConfig
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: Mask, keys: Keys) -> jax.Array:
        cfg = self.config
        keys, layer_keys = keys.tower(self.num_layers)
        keys = keys.sample({"embedded": (1, cfg.emb_dim), "encoded": x.shape[1:]}, cfg.dropout_rate)
        bias = None if cfg.per_layer_relative_position_bias else relative_bias(cfg, keys, bidirectional=True)
        x = dropout(x, cfg.dropout_rate, keys.child("embedded"))
        if bias is not None:
            mask, bias = prepare_attention(cfg, x, x.shape[1], mask, bias)
        x = run_layers(EncoderLayer, cfg, "encoder", self.num_layers, x, layer_keys, bias, mask)
        x = RMSNorm(cfg.dtype, name="encoder_norm")(x)
        # Unlike everywhere else, T5 samples dropout per position here.
        return dropout(x, cfg.dropout_rate, keys.child("encoded"), shape=x.shape[1:])


class Decoder(nn.Module):
    config: NetworkConfig
    num_layers: int

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        mask: Mask,
        keys: Keys,
        *,
        table: jax.Array | None = None,
        encoded: jax.Array | None = None,
        cross_mask: Mask | None = None,
        cache: str | None = None,
        prefill_lengths: jax.Array | None = None,
        logits_of: jax.Array | None = None,
        as_factors: bool = False,
    ) -> "jax.Array | LogitFactors":
        """Return logits, int [batch, length] -> float32 [batch, length, vocab].

        Args:
          table: token embeddings, [vocab, emb]. If None, the decoder owns a table.
          encoded, cross_mask: encoder output and mask of cross-attention. None for a decoder-only network.
          cache, prefill_lengths: see `Attention`.
          logits_of: int [batch, n], tokens of each row to compute logits for, [batch, length, n]. None computes all.
          as_factors: return the factors of the logits instead.
        """
        cfg = self.config
        keys, layer_keys = keys.tower(self.num_layers)
        keys = keys.sample({"embedded": (1, cfg.emb_dim), "decoded": (1, cfg.emb_dim)}, cfg.dropout_rate)
        if table is None:
            table = Embed(cfg.vocab_size, cfg.emb_dim, name="token_embedder")(keys.child("token_embedder"))
        bias = None if cfg.per_layer_relative_position_bias else relative_bias(cfg, keys, bidirectional=False)
        x = dropout(embed(table, tokens, cfg.residual_dtype), cfg.dropout_rate, keys.child("embedded"))
        if cache == "self" and ops().moves_row_offsets and not cfg.scan_layers:
            # A beam search fills it, and then moves these numbers instead of keys and values.
            offsets = self.variable("cache", ROW_OFFSETS, jnp.zeros, (x.shape[0], 1), jnp.int32).value
            mask = mask.replace(row_offsets=offsets if offsets.shape[1] > 1 else None)
        if bias is not None:
            mask, bias = prepare_attention(cfg, x, x.shape[1], mask, bias)
        if encoded is not None and cross_mask is not None and cache is None:
            cross_mask, _ = prepare_attention(cfg, x, encoded.shape[1], cross_mask, None)
        shared = (bias, mask, encoded, cross_mask, prefill_lengths)
        x = run_layers(DecoderLayer, cfg, "decoder", self.num_layers, x, layer_keys, *shared, cache=cache)
        x = RMSNorm(cfg.dtype, name="decoder_norm")(x)
        x = dropout(x, cfg.dropout_rate, keys.child("decoded"))
        scale = float(1 / np.sqrt(cfg.emb_dim)) if cfg.logits_via_embedding else 1.0

        def dense(dtype: Any) -> Kernel:
            return Kernel(cfg.vocab_size, ("embed", "vocab"), dtype, name="logits_dense")

        def stored_kernel() -> jax.Array:
            return table.T if cfg.logits_via_embedding else dense(None)(cfg.emb_dim, keys.child("logits_dense"))

        if as_factors:
            return LogitFactors(x, stored_kernel(), scale)
        # Matmuls in `dtype`, as everywhere, but with a float32 result.
        if logits_of is not None:
            rows = lookup(stored_kernel().T, logits_of).astype(cfg.dtype)
            return scale * jnp.einsum("bqd,bnd->bqn", x, rows, preferred_element_type=jnp.float32)
        if not cfg.logits_via_embedding:
            (logits,) = project(self, x, [dense(cfg.dtype)], keys, dtype=jnp.float32)
        elif cache is not None and x.shape[1] == 1:
            logits = ops().few_rows(x, table, jnp.float32)
        else:
            logits = jnp.dot(x, table.T.astype(cfg.dtype), preferred_element_type=jnp.float32)
        return constrain(scale * logits, "batch", "length", "vocab")
