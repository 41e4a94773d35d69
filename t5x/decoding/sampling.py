"""Sampling with temperature, top-k and top-p, and greedy decoding."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x._runtime.errors import ArgumentError
from t5x.decoding import limits
from t5x.decoding.loop import decoding_loop, is_row_independent
from t5x.decoding.state import (
    NEG_INF,
    LogitCallback,
    TokensToLogits,
    example_keys,
    is_eos,
    repeat_rows,
    set_token,
    start_from_prompts,
    take_beams,
    token_at,
)

MIN_TEMPERATURE = 1e-4


class SamplingLoopState(flax.struct.PyTreeNode):
    """The state of `temperature_sample`, as its callbacks see it; see also `DecodingState`.

    Attributes:
      step: int32, number of steps taken.
      ended: bool [rows].
      rng: one key per row; the token at position p is sampled with fold_in(key, p - 1).
      log_prob: float32 [rows], log probability of the sampled tokens.
    """

    step: jax.Array
    cur_index: jax.Array
    sequences: jax.Array
    cache: Any
    cur_token: jax.Array
    ended: jax.Array
    rng: jax.Array
    log_prob: jax.Array
    prompt_end: jax.Array | None = None
    eos_id: jax.Array | tuple[jax.Array, ...] | None = None


StateCallbackFn = Callable[[SamplingLoopState], SamplingLoopState]


def temperature_sample(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int | jax.Array | tuple[int, ...],
    decode_rng: jax.Array | None = None,
    num_decodes: int = 1,
    temperature: float | jax.Array = 1.0,
    topk: int | jax.Array = 1,
    topp: float | jax.Array = 0.0,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
    max_decode_steps: int | jax.Array | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: StateCallbackFn | None = None,
    logit_callback_fn: LogitCallback | None = None,
    pad_id: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Sample until every row has ended or reached the length limit. The default, topk=1, is greedy decoding.

    A sample depends only on the example's key, prompt and logits: not on the batch, the row, the sharding or
    `num_decodes`.

    Args:
      inputs: int32 [batch, length], prompts shifted right: the start token at position 0, and `pad_id` wherever output
        may go. Prompts are forced, do not contribute to the scores, and an EOS inside them does not end the row.
      cache: the network's cache for `batch` rows: empty, or filled up to `initial_index`.
      tokens_to_logits: state -> (logits [batch * num_decodes, vocab], new cache).
      eos_id: token that ends a row, or a tuple of several; it is included in the output and followed by `pad_id`.
      decode_rng: one key per example, or a single key into which the row is folded; None is `jax.random.key(0)`.
      num_decodes: number of samples per example.
      temperature: divides the logits; one value, or one per example [batch]. At 1e-4 and below, decoding is greedy.
      topk: sample from the k largest logits, ties included; 1 is argmax, 0 keeps all tokens. One value, or one per
        example.
      topp: sample from the smallest set of top tokens whose probabilities reach this sum, ties included; 0 keeps all
        tokens. One value, or one per example. Applies after `topk`; Python numbers may not set both, because that is
        rarely intended.
      cache_offset: row axis of the cache; 1 if it has a leading layer axis.
      initial_index: int32 [batch], position of each row's last prompt token, where decoding starts.
      max_decode_steps: maximum number of tokens after the prompt; one value, or one per example; None is no limit.
      max_decode_steps_hard_limit: upper bound of `max_decode_steps`, if positive; useful when that is user input.
      rescale_log_probs: score with the distribution that was sampled from (0 for greedy decoding); False scores with
        the network's distribution.
      state_callback_fn: state -> state, called before every step and after the last.
      logit_callback_fn: (logits, state) -> logits, called before the temperature; see `t5x.decoding.constraints`.
      pad_id: the padding token.

    Returns:
      int32 [batch, num_decodes, length] and float32 [batch, num_decodes]: tokens and their total log probabilities,
      highest last.

    Raises:
      ArgumentError: if an option is out of range.
    """
    batch, length = inputs.shape
    if all(isinstance(value, int | float) and value for value in (topk, topp)):
        raise ArgumentError(f"topk={topk} and topp={topp} are both set. Set topk=0 to sample by topp, or topp=0.")
    if max_decode_steps is not None and max_decode_steps_hard_limit is not None and max_decode_steps_hard_limit > 0:
        smaller = min if isinstance(max_decode_steps, int) else jnp.minimum
        max_decode_steps = smaller(max_decode_steps, max_decode_steps_hard_limit)
    if isinstance(max_decode_steps, int) and max_decode_steps > length:
        raise ArgumentError(f"max_decode_steps is {max_decode_steps}, but the target length is {length}. Lower it.")
    limits.check_number("num_decodes", num_decodes, low=1)
    limits.check_number("temperature", temperature, low=0)
    limits.check_number("topk", topk, low=0)
    limits.check_number("topp", topp, low=0, high=1)
    sequences, index, prompt_end = start_from_prompts(inputs, initial_index, pad_id)
    if state_callback_fn is not None:  # which may write a token after the last one, as in T5X
        sequences = jnp.pad(sequences, ((0, 0), (0, 1)), constant_values=pad_id)
    limit = jnp.full(batch, length)
    if max_decode_steps is not None:
        limit = jnp.minimum(limit, prompt_end + max_decode_steps)

    def each_row(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_decodes, axis=0)

    options = {"temperature": temperature, "topk": topk, "topp": topp}
    row_options = {name: each_row(jnp.asarray(x))[:, None] for name, x in options.items() if jnp.ndim(x)}
    row_limit = each_row(limit)
    keys = example_keys(decode_rng, jnp.arange(batch))
    fold_in = jax.vmap(jax.random.fold_in)

    def step(tokens_to_logits: TokensToLogits, fixed: tuple, state: SamplingLoopState) -> SamplingLoopState:
        limit, row_options = fixed
        if state_callback_fn is not None:
            state = state_callback_fn(state)
        logits, cache = tokens_to_logits(state)
        logits = logits.astype(jnp.float32)
        if logit_callback_fn is not None:
            logits = logit_callback_fn(logits, state)
        keys = fold_in(state.rng, state.cur_index)
        token, log_prob = _sample(logits, keys, rescale_log_probs, **(options | row_options))
        following = state.cur_index + 1
        prompt = token_at(state.sequences, following)
        free = (prompt == pad_id) & ~state.ended
        token = jnp.where(free, token, jnp.where(state.ended, pad_id, prompt))
        sequences = jnp.where(state.ended[:, None], state.sequences, set_token(state.sequences, following, token))
        found_eos = free & is_eos(token, state.eos_id)
        if state_callback_fn is not None:  # one that it wrote also ends the row
            found_eos |= jnp.sum(is_eos(sequences, state.eos_id), axis=1) > prompt_eos
        return state.replace(
            step=state.step + 1,
            cur_index=jnp.where(state.ended, state.cur_index, following),
            cur_token=token[:, None],
            cache=cache,
            sequences=sequences,
            ended=state.ended | found_eos | (following >= limit),
            log_prob=state.log_prob + jnp.where(free, log_prob, 0.0),
        )

    index = each_row(index)
    sequences = each_row(sequences)
    eos = jax.tree.map(lambda token: jnp.asarray(token, jnp.int32), eos_id)
    prompt_eos = jnp.sum(is_eos(sequences, eos), axis=1)
    state = SamplingLoopState(
        step=jnp.int32(0),
        cur_index=index,
        cur_token=token_at(sequences, index)[:, None],
        cache=repeat_rows(cache, batch, num_decodes, cache_offset),
        sequences=sequences,
        prompt_end=each_row(prompt_end),
        eos_id=eos,
        ended=index >= row_limit,
        rng=fold_in(each_row(keys), jnp.tile(jnp.arange(num_decodes), batch)),
        log_prob=jnp.zeros(batch * num_decodes),
    )

    def results(state: SamplingLoopState) -> tuple[jax.Array, jax.Array]:
        if state_callback_fn is not None:
            state = state_callback_fn(state)
        return state.sequences, state.log_prob

    sequences, log_prob = decoding_loop(
        step,
        state,
        tokens_to_logits=tokens_to_logits,
        fixed=(row_limit, row_options),
        is_open=lambda state: jnp.any(~state.ended.reshape(-1, num_decodes), axis=1),
        results=results,
        cache_rows=batch * num_decodes,
        cache_axis=cache_offset,
        may_shrink=state_callback_fn is None and is_row_independent(logit_callback_fn),
    )
    scores = log_prob.reshape(batch, num_decodes)
    order = jnp.argsort(scores, axis=-1)
    tokens = sequences[:, 1 : length + 1].reshape(batch, num_decodes, length)
    return take_beams(tokens, order), jnp.take_along_axis(scores, order, axis=-1)


def greedy_decode(
    *,
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int | jax.Array | tuple[int, ...],
    num_decodes: int = 1,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
    logit_callback_fn: LogitCallback | None = None,
    pad_id: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Decode greedily: take the argmax at every step; ties go to the lower token.

    Args:
      num_decodes: must be 1.
      decode_rng: unused; part of T5X's signature.
      inputs, cache, …: see `temperature_sample`.

    Returns:
      int32 [batch, 1, length] and float32 [batch, 1]: tokens, and the log probability of those after the prompt.

    Raises:
      ArgumentError: if num_decodes is not 1.
    """
    del decode_rng
    if num_decodes != 1:
        raise ArgumentError(f"num_decodes is {num_decodes}, but greedy decoding has one result. Set num_decodes=1.")
    return temperature_sample(
        inputs, cache, tokens_to_logits, eos_id, topk=1, cache_offset=cache_offset, initial_index=initial_index,
        rescale_log_probs=False, logit_callback_fn=logit_callback_fn, pad_id=pad_id,
    )  # fmt: skip


def _sample(
    logits: jax.Array, keys: jax.Array, rescale_log_probs: bool, temperature: Any, topk: Any, topp: Any
) -> tuple[jax.Array, jax.Array]:
    """Sample tokens int32 [rows] and return their log probabilities [rows]. The options are scalars or [rows, 1]."""

    def log_prob_of(logits: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], -1)[:, 0]

    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if isinstance(topk, int) and topk == 1:
        token, log_prob = best, jnp.zeros(best.shape)
    else:
        scaled = logits / jnp.maximum(temperature, MIN_TEMPERATURE)
        if not isinstance(topk, int) or topk:
            scaled = topk_mask(scaled, jnp.where(jnp.asarray(topk) > 0, topk, scaled.shape[-1]))
        if not isinstance(topp, int | float) or topp:
            scaled = topp_mask(scaled, jnp.where(jnp.asarray(topp) > 0, topp, jnp.inf))
        token = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
        greedy = ((jnp.asarray(temperature) <= MIN_TEMPERATURE) | (jnp.asarray(topk) == 1)).reshape(-1)
        token = jnp.where(greedy, best, token)
        log_prob = jnp.where(greedy, 0.0, log_prob_of(scaled, token))
    return token, log_prob if rescale_log_probs else log_prob_of(logits, token)


def topk_mask(x: jax.Array, k: int | jax.Array, replace_val: float | jax.Array = NEG_INF) -> jax.Array:
    """Replace values below the k-th largest of their row; ties keep more. `k` may be traced, and may be [rows, 1]."""
    return _keep_largest(x, lambda mask: jnp.sum(mask, axis=-1, keepdims=True) >= k, replace_val)


def topp_mask(logits: jax.Array, p: float | jax.Array, replace_val: float | jax.Array = NEG_INF) -> jax.Array:
    """Keep the largest logits of a row whose probabilities reach `p`, ties included, and replace the others.

    `p` may be traced, and may be [rows, 1].
    """
    probabilities = jax.nn.softmax(jnp.asarray(logits, jnp.float32))

    def reach_p(mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, probabilities, 0.0), axis=-1, keepdims=True) >= p

    return _keep_largest(logits, reach_p, replace_val)


def _keep_largest(
    logits: jax.Array, enough: Callable[[jax.Array], jax.Array], replace_val: float | jax.Array
) -> jax.Array:
    """Keep the logits of each row above the highest threshold for which `enough` are kept; replace the others.

    The threshold is found bit by bit in 32 passes, which cost less than a sort and never need all logits at once.

    Args:
      logits: [rows, vocab].
      enough: bool [rows, vocab], which logits are kept -> bool [rows, 1]; monotonic.
    """
    # + 0.0 turns -0.0 into 0.0
    bits = jax.lax.bitcast_convert_type(jnp.asarray(logits, jnp.float32) + 0.0, jnp.uint32)
    highest = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= highest, ~bits, bits | highest)  # unsigned integers in the order of the floats

    def next_bit(i: int | jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (highest >> jnp.uint32(i))
        return jnp.where(enough(ordered >= higher), higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros((*logits.shape[:-1], 1), jnp.uint32))
    return jnp.where(ordered >= threshold, logits, replace_val).astype(logits.dtype)
