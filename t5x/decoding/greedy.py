"""Greedy decoding: the likeliest token at every step."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x.errors import UserError


@flax.struct.dataclass
class DecodingState:
    """What a decoding function shows the network at a step.

    Attributes:
      cur_index: int32, position of the token being fed: one for all rows, or [batch].
      cur_token: int32 [batch, 1].
      cache: the network's cache, advanced at every step.
    """

    cur_index: jax.Array
    cur_token: jax.Array
    cache: Any


TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Any]]


def greedy_decode(
    *,
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 1,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Decodes until every row has ended or the length is reached.

    Args:
      inputs: int32 [batch, length]; with `initial_index`, the prompts, else only its shape counts.
      cache: the network's empty cache.
      tokens_to_logits: (state) -> (logits [batch, vocab], new cache).
      eos_id: ends a row; it is part of the output, zeros follow it.
      num_decodes: 1; greedy decoding has one result.
      decode_rng, cache_offset: of T5X's signature; nothing here is random, and the cache has no leading dimensions.
      initial_index: int32 [batch], the position of each row's last prompt token, where its decoding begins; the cache
        holds what is before it.

    Returns:
      (int32 [batch, 1, length], float32 [batch, 1]): tokens, and the sum of their log probabilities.
    """
    del decode_rng, cache_offset
    if num_decodes != 1:
        raise UserError(f"num_decodes is {num_decodes}, but greedy decoding has one result: set num_decodes=1.")
    batch, length = inputs.shape

    def unfinished(carry):
        state, _, _, ended = carry
        return ~jnp.all(ended | (state.cur_index >= length))

    def step(carry):
        state, tokens, scores, ended = carry
        logits, cache = tokens_to_logits(state)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        over = ended | (state.cur_index >= length)
        token = jnp.where(over, 0, jnp.argmax(log_probs, axis=-1).astype(jnp.int32))
        gained = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
        scores = scores + jnp.where(over, 0.0, gained)
        if initial_index is None:
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], state.cur_index, axis=1)
        else:
            tokens = tokens.at[jnp.arange(batch), state.cur_index].set(token, mode="drop")
        return DecodingState(state.cur_index + 1, token[:, None], cache), tokens, scores, ended | (token == eos_id)

    if initial_index is None:
        first = DecodingState(jnp.int32(0), jnp.zeros((batch, 1), jnp.int32), cache)
        tokens = jnp.zeros((batch, length), jnp.int32)
    else:
        prompts_last = jnp.take_along_axis(inputs, initial_index[:, None], axis=1)
        first = DecodingState(initial_index.astype(jnp.int32), prompts_last.astype(jnp.int32), cache)
        tokens = jnp.pad(inputs[:, 1:], ((0, 0), (0, 1))).astype(jnp.int32)  # they come shifted right
    carry = (first, tokens, jnp.zeros(batch), jnp.zeros(batch, bool))
    _, tokens, scores, _ = jax.lax.while_loop(unfinished, step, carry)
    return tokens[:, None, :], scores[:, None]
