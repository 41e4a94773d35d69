"""The T5 encoder-decoder in Linen, with T5X's call convention, parameter names and logical axes.

Layers are unrolled (`layers_0`, `layers_1` …) or scanned (one stack, `encoder/encoder` and `decoder/decoder`). Initial
values and dropout are the same either way.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x._runtime.errors import UserError
from t5x.kernels.attention_inputs import Mask, segments_of
from t5x.network.config import T5Config
from t5x.network.keys import Keys
from t5x.network.layers import Embed, embed
from t5x.network.towers import Decoder, Encoder, LogitFactors


class Transformer(nn.Module):
    """A T5 encoder-decoder.

    A subclass may define `setup` with an encoder and a decoder of its own. They are called as T5X calls them: with
    tokens, masks as arrays and `deterministic`.

    Example:
      >>> module = Transformer(T5Config(vocab_size=384, emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128))
      >>> variables = module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)
      >>> logits = module.apply(variables, tokens, tokens, tokens, enable_dropout=False)   # [batch, length, vocab]
    """

    config: T5Config

    def setup(self):
        cfg = self.config
        self.token_embedder = Embed(cfg.vocab_size, cfg.emb_dim)
        self.encoder = Encoder(cfg, cfg.num_encoder_layers)
        self.decoder = Decoder(cfg, cfg.num_decoder_layers)

    def encode(
        self,
        encoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        enable_dropout: bool = True,
        row_index: jax.Array | None = None,
    ) -> jax.Array:
        """Encode tokens, int [batch, inputs] -> [batch, inputs, emb]."""
        keys = Keys.of(self, encoder_input_tokens, enable_dropout, row_index)
        real = encoder_input_tokens != self.config.pad_token_id
        mask = Mask(key_segments=segments_of(real, encoder_segment_ids), query_segments=encoder_segment_ids)
        if not isinstance(self.encoder, Encoder):
            length = encoder_input_tokens.shape[1]
            array = self._array(mask, encoder_input_tokens, length, length)
            return self.encoder(encoder_input_tokens, array, deterministic=not enable_dropout)
        x = embed(self.token_embedder(keys.child("token_embedder")), encoder_input_tokens, self.config.residual_dtype)
        return self.encoder(x, mask, keys.child("encoder"))

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
        logits_of: jax.Array | None = None,
        as_factors: bool = False,
    ) -> jax.Array | LogitFactors:
        """Return logits, float32 [batch, targets, vocab].

        With `decode`, the first call creates the caches, sized for the length of `decoder_input_tokens`, and fills
        `cross_cache` from `encoded`. Each later call takes one token per row and advances `cache`; it may have several
        rows (beams) per input row.

        Args:
          logits_of: int [batch, n], tokens of each row to compute logits for, [batch, targets, n]. None computes all.
          as_factors: return the factors of the logits instead.
        """
        if decode and (encoder_segment_ids is not None or decoder_segment_ids is not None):
            raise UserError("Packed examples cannot be decoded incrementally: set pack=False for inference.")
        keys = Keys.of(self, decoder_input_tokens, enable_dropout, row_index)
        sources = encoder_input_tokens != self.config.pad_token_id
        real = decoder_target_tokens != self.config.pad_token_id
        if decoder_segment_ids is None:
            encoder_segment_ids = None  # a target sees all inputs
        elif encoder_segment_ids is None:
            raise ValueError("decoder_segment_ids are given without encoder_segment_ids: packed rows need both")
        # While decoding, the cache has nothing after the current position and no padding before it.
        targets = None if decode else segments_of(real, decoder_segment_ids)
        mask = Mask(key_segments=targets, query_segments=decoder_segment_ids, causal=True)
        cross_mask = Mask(key_segments=segments_of(sources, encoder_segment_ids), query_segments=decoder_segment_ids)
        if not isinstance(self.decoder, Decoder):
            length = decoder_input_tokens.shape[1]
            logits = self.decoder(
                encoded,
                decoder_input_tokens=decoder_input_tokens,
                decoder_positions=decoder_positions,
                decoder_mask=None if decode else self._array(mask, decoder_input_tokens, length, length),
                encoder_decoder_mask=self._array(cross_mask, encoder_input_tokens, length, sources.shape[1]),
                deterministic=not enable_dropout,
                decode=decode,
                max_decode_length=max_decode_length,
            )
            return logits if logits_of is None else jnp.take_along_axis(logits, logits_of[:, None], axis=-1)
        # Relative positions need no `decoder_positions`, and the cache has its length.
        return self.decoder(
            decoder_input_tokens,
            mask,
            keys.child("decoder"),
            table=self.token_embedder(keys.child("token_embedder")),
            encoded=encoded,
            cross_mask=cross_mask,
            cache="self" if decode else None,
            logits_of=logits_of,
            as_factors=as_factors,
        )

    def _array(self, mask: Mask, tokens: jax.Array, q_length: int, k_length: int) -> jax.Array:
        """Return a mask as T5X has it, [batch, 1, q, k] of the network's dtype."""
        allowed = mask.allowed(q_length, k_length)
        assert allowed is not None, "all masks are causal or hide padding"
        return jnp.broadcast_to(allowed, (tokens.shape[0], 1, q_length, k_length)).astype(self.config.dtype)

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
        as_factors: bool = False,
    ) -> jax.Array | LogitFactors:
        """Return logits, float32 [batch, targets, vocab], under teacher forcing.

        Args:
          encoder_segment_ids, decoder_segment_ids: int, which example of a packed row a token belongs to.
          encoder_positions, decoder_positions: accepted for T5X's convention; T5 has no absolute positions.
          row_index: int [batch], row numbers in the global batch, which key dropout; 0, 1, 2 … by default.
          as_factors: return the factors of the logits instead.
        """
        del encoder_positions
        encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout, row_index)
        # A user's override of `decode` may not accept it.
        optional: dict[str, Any] = {"as_factors": True} if as_factors else {}
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
            **optional,
        )
