"""Prompt tuning: trained vectors before the embedded inputs; all other parameters are frozen."""

import re

import flax.linen as nn
import jax.numpy as jnp
from flax import traverse_util
from flax.linen import partitioning as nn_partitioning

from t5x import adafactor, optimizers
from t5x.examples.t5 import layers, network

PROMPT = 3


class PromptEncoder(nn.Module):
    config: network.T5Config
    shared_embedding: nn.Module

    @nn.compact
    def __call__(self, tokens, mask, deterministic):
        cfg = self.config
        prompt = nn_partitioning.param_with_axes(
            "prompt", nn.initializers.normal(0.5), (PROMPT, cfg.emb_dim), jnp.float32, axes=("prompt", "embed")
        )
        biases = layers.RelativePositionBiases(32, 128, cfg.num_heads, cfg.dtype, name="relpos_bias")
        x = self.shared_embedding(tokens)
        x = jnp.concatenate([jnp.broadcast_to(prompt, (x.shape[0], *prompt.shape)), x], axis=1)
        for i in range(cfg.num_encoder_layers):
            x = network.EncoderLayer(cfg, biases, name=f"layers_{i}")(x, mask, deterministic)
        return layers.LayerNorm(dtype=cfg.dtype, name="encoder_norm")(x)


class PromptTransformer(nn.Module):
    config: network.T5Config

    def setup(self):
        cfg = self.config
        self.token_embedder = layers.Embed(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype)
        self.encoder = PromptEncoder(cfg, self.token_embedder)
        self.decoder = network.Decoder(cfg, self.token_embedder)

    @staticmethod
    def _with_prompt(tokens):
        return jnp.concatenate([jnp.ones((tokens.shape[0], PROMPT), tokens.dtype), tokens], axis=1)

    def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True):
        real = self._with_prompt(encoder_input_tokens) > 0
        return self.encoder(encoder_input_tokens, layers.make_attention_mask(real, real), not enable_dropout)

    def decode(self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
               encoder_segment_ids=None, decoder_segment_ids=None, decoder_positions=None, enable_dropout=True,
               decode=False, max_decode_length=None):  # fmt: skip
        real = self._with_prompt(encoder_input_tokens) > 0
        if decode:
            masks = None, layers.make_attention_mask(jnp.ones_like(decoder_target_tokens), real)
        else:
            mask = layers.make_decoder_mask(decoder_target_tokens, jnp.float32)
            masks = mask, layers.make_attention_mask(decoder_target_tokens > 0, real)
        options = {"deterministic": not enable_dropout, "decode": decode, "max_decode_length": max_decode_length}
        return self.decoder(encoded, decoder_input_tokens, decoder_positions, *masks, **options)

    def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
                 decoder_segment_ids=None, encoder_positions=None, decoder_positions=None, *, enable_dropout=True,
                 decode=False):  # fmt: skip
        encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
        return self.decode(encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
                           enable_dropout=enable_dropout, decode=decode)  # fmt: skip


def only_prompts(optimizer=None):
    """Train only the parameters named `prompt`."""
    prompts = traverse_util.ModelParamTraversal(lambda path, _: re.search("prompt$", path) is not None)
    return optimizers.MultiOptimizer([(prompts, optimizer or adafactor.Adafactor())])
