"""A decoder-only network (causal or prefix language model) with T5X's call convention and parameter names."""

import flax.linen as nn
import jax

from t5x._runtime.errors import UserError
from t5x.kernels.attention_inputs import Mask, segments_of
from t5x.network.config import TransformerConfig
from t5x.network.keys import Keys
from t5x.network.towers import Decoder, LogitFactors


class DecoderWrapper(nn.Module):
    """A decoder-only T5.

    Example:
      >>> config = TransformerConfig(vocab_size=384, emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128, num_layers=2)
      >>> variables = DecoderWrapper(config).init(jax.random.key(0), tokens, tokens, enable_dropout=False)
      >>> logits = DecoderWrapper(config).apply(variables, tokens, tokens, enable_dropout=False)
    """

    config: TransformerConfig

    def setup(self):
        self.decoder = Decoder(self.config, self.config.num_layers)

    def __call__(
        self,
        decoder_input_tokens: jax.Array,
        decoder_target_tokens: jax.Array,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        decoder_causal_attention: jax.Array | None = None,
        *,
        enable_dropout: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
        prefill: bool = False,
        prefill_lengths: jax.Array | None = None,
        row_index: jax.Array | None = None,
        as_factors: bool = False,
    ) -> jax.Array | LogitFactors:
        """Return logits, float32 [batch, length, vocab].

        Args:
          decoder_target_tokens: 0 marks padding, which is never attended to.
          decoder_segment_ids: int, which example of a packed row a token belongs to.
          decoder_positions: accepted for T5X's convention; T5 has no absolute positions.
          decoder_causal_attention: 1 on the prefix (the start token and the inputs), whose positions attend to each
            other in both directions. None makes all positions causal.
          decode: the first call creates the cache, sized for the length of the tokens; each later call takes one token
            per row and advances the cache.
          prefill: read entire rows into the cache, creating it if needed. `prefill_lengths`, int [batch], is the
            position from which each row is decoded.
          row_index: int [batch], row numbers in the global batch, which key dropout; 0, 1, 2 … by default.
          as_factors: return the factors of the logits instead.
        """
        del decoder_positions, max_decode_length  # relative positions need neither; the cache has its length
        if (decode or prefill) and decoder_segment_ids is not None:
            raise UserError("Packed examples cannot be decoded incrementally: set pack=False for inference.")
        if prefill and prefill_lengths is None:
            raise ValueError("prefill needs prefill_lengths: from which position on each row is decoded")
        # While decoding, the cache has nothing after the current position and no padding before it.
        key_segments = None if decode and not prefill else segments_of(decoder_target_tokens > 0, decoder_segment_ids)
        return self.decoder(
            decoder_input_tokens,
            Mask(key_segments, decoder_segment_ids, prefix=decoder_causal_attention, causal=True),
            Keys.of(self, decoder_input_tokens, enable_dropout, row_index).child("decoder"),
            cache="rows" if decode or prefill else None,
            prefill_lengths=prefill_lengths if prefill else None,
            as_factors=as_factors,
        )
