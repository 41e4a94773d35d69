"""The towers: an encoder, and a decoder that attends to one or stands alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t5x.network.attention import Mask
from t5x.network.blocks import DecoderLayer, EncoderLayer, relative_bias, run_layers
from t5x.network.config import NetworkConfig
from t5x.network.keys import Keys, dropout
from t5x.network.layers import Dense, Embed, RMSNorm, embed, few_rows
from t5x.partitioning.logical import constrain


class Encoder(nn.Module):
    config: NetworkConfig
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: Mask, keys: Keys) -> jax.Array:
        cfg = self.config
        bias = None if cfg.per_layer_relative_position_bias else relative_bias(cfg, keys, bidirectional=True)
        x = dropout(x, cfg.dropout_rate, keys.at("embedded"))
        x = run_layers(EncoderLayer, cfg, "encoder", self.num_layers, x, keys.at("layers"), bias, mask)
        x = RMSNorm(cfg.dtype, name="encoder_norm")(x)
        # T5 drops single positions here, unlike everywhere else.
        return dropout(x, cfg.dropout_rate, keys.at("encoded"), broadcast_length=False)


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
    ) -> jax.Array:
        """int [batch, length] -> logits float32 [batch, length, vocab].

        Args:
          table: of token embeddings, [vocab, emb]; None: the decoder has its own.
          encoded, cross_mask: what cross-attention sees; None: there is none.
          cache, prefill_lengths: see `Attention`.
          logits_of: int [batch, n], tokens of each row whose logits are wanted, [batch, length, n]; None: of all.
        """
        cfg = self.config
        if table is None:
            table = Embed(cfg.vocab_size, cfg.emb_dim, cfg.dtype, name="token_embedder")(keys.at("token_embedder"))
        bias = None if cfg.per_layer_relative_position_bias else relative_bias(cfg, keys, bidirectional=False)
        x = dropout(embed(table, tokens, cfg.dtype), cfg.dropout_rate, keys.at("embedded"))
        shared = (bias, mask, encoded, cross_mask, prefill_lengths)
        x = run_layers(DecoderLayer, cfg, "decoder", self.num_layers, x, keys.at("layers"), *shared, cache=cache)
        x = RMSNorm(cfg.dtype, name="decoder_norm")(x)
        x = dropout(x, cfg.dropout_rate, keys.at("decoded")).astype(jnp.float32)
        if cfg.logits_via_embedding:
            if logits_of is not None:
                products = jnp.einsum("bqd,bnd->bqn", x, table[logits_of])
            elif cache is not None and x.shape[1] == 1 and jax.default_backend() == "cpu":
                products = few_rows(x, table)
            else:
                products = x @ table.T
            logits = products / np.sqrt(x.shape[-1])
        else:
            logits = Dense(cfg.vocab_size, ("embed", "vocab"), jnp.float32, name="logits_dense")(
                x, keys.at("logits_dense"), logits_of
            )
        return logits if logits_of is not None else constrain(logits, "batch", "length", "vocab")
