"""Greedy decoding: the likeliest token at every step."""

from typing import Any

import jax

from t5x.decoding.sampling import temperature_sample
from t5x.decoding.state import LogitCallback, TokensToLogits
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
      decode_rng: of T5X's signature; nothing here is random.
      cache_offset: the axis of the cache that counts rows: 1 where layers are stacked in front of it.
      initial_index: int32 [batch], the position of each row's last prompt token, where its decoding begins.
      logit_callback_fn: (logits, state) -> logits, see `t5x.decoding.constraints`.

    Returns:
      (int32 [batch, 1, length], float32 [batch, 1]): tokens, and the sum of the log probabilities of those that are
      not of the prompt. A tie goes to the lower token.
    """
    del decode_rng
    if num_decodes != 1:
        raise UserError(f"num_decodes is {num_decodes}, but greedy decoding has one result: set num_decodes=1.")
    return temperature_sample(
        inputs, cache, tokens_to_logits, eos_id, topk=1, cache_offset=cache_offset, initial_index=initial_index,
        rescale_log_probs=False, logit_callback_fn=logit_callback_fn,
    )  # fmt: skip
