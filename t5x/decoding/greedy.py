"""Greedy decoding: the likeliest token at every step."""

from typing import Any

import jax
import jax.numpy as jnp

from t5x.decoding import state as rows
from t5x.decoding.state import DecodingState, LogitCallback, TokensToLogits
from t5x.errors import UserError


def greedy_decode(
    *,
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int | jax.Array,
    num_decodes: int = 1,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
    logit_callback_fn: LogitCallback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Decodes until every row has ended or the length is reached.

    Args:
      inputs: int32 [batch, length], the prompts, shifted right: 0 at position 0, and wherever the output may go.
      cache: the network's cache: empty, or with `initial_index` filled up to there.
      tokens_to_logits: (state) -> (logits [batch, vocab], new cache).
      eos_id: ends a row; it is part of the output, zeros follow it.
      num_decodes: 1; greedy decoding has one result.
      decode_rng, cache_offset: of T5X's signature; nothing here is random, and rows are never reordered.
      initial_index: int32 [batch], the position of each row's last prompt token, where its decoding begins.
      logit_callback_fn: (logits, state) -> logits, see `t5x.decoding.constraints`.

    Returns:
      (int32 [batch, 1, length], float32 [batch, 1]): tokens, and the sum of the log probabilities of those that are
      not of the prompt. A tie goes to the lower token.
    """
    del decode_rng, cache_offset
    if num_decodes != 1:
        raise UserError(f"num_decodes is {num_decodes}, but greedy decoding has one result: set num_decodes=1.")
    batch, length = inputs.shape
    sequences, index, prompt_end = rows.begin(inputs, initial_index)
    eos_id = jnp.asarray(eos_id, jnp.int32)

    def step(carry):
        index, sequences, scores, ended, cache = carry
        state = DecodingState(index, rows.token_at(sequences, index)[:, None], cache, sequences, prompt_end, eos_id)
        logits, cache = tokens_to_logits(state)
        logits = logits.astype(jnp.float32)
        if logit_callback_fn is not None:
            logits = logit_callback_fn(logits, state)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        gained = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
        prompt = rows.token_at(sequences, index + 1)
        free = (prompt == 0) & ~ended
        sequences = rows.with_token(sequences, index + 1, jnp.where(free, best, prompt))
        ended |= (free & (best == eos_id)) | (index + 1 >= length)
        return index + 1, sequences, scores + jnp.where(free, gained, 0.0), ended, cache

    carry = (index, sequences, jnp.zeros(batch), index >= length, cache)
    _, sequences, scores, _, _ = jax.lax.while_loop(lambda carry: ~jnp.all(carry[3]), step, carry)
    return sequences[:, None, 1:], scores[:, None]
