"""Sampling: temperature, top-k and top-p."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x.decoding import narrowing
from t5x.decoding import state as rows
from t5x.decoding.state import NEG_INF, DecodingState, LogitCallback, TokensToLogits
from t5x.errors import UserError

MIN_TEMPERATURE = 1e-4


@flax.struct.dataclass
class SamplingLoopState(DecodingState):
    """The loop of `temperature_sample`, as its callbacks see it.

    Attributes:
      step: int32, how many steps were done.
      ended: bool [rows].
      rng: a key for each row; the token at position p is drawn with the key that p is folded into.
      log_prob: float32 [rows], of the tokens sampled so far.
    """

    step: jax.Array
    ended: jax.Array
    rng: jax.Array
    log_prob: jax.Array


def temperature_sample(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int | jax.Array,
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
    state_callback_fn: Callable[[SamplingLoopState], SamplingLoopState] | None = None,
    logit_callback_fn: LogitCallback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Samples until every row has ended or the length is reached. By default, with topk=1, this is greedy decoding.

    What is drawn for an example depends on its key, its prompt and its logits alone: not on the batch it is in, its row
    there, how the batch is divided over devices, or how many more decodes are asked for.

    Args:
      inputs: int32 [batch, length], the prompts, shifted right: 0 at position 0, and wherever the output may go. They
        are forced, and their log probability is not counted. An EOS in them ends nothing.
      cache: the network's cache for `batch` rows: empty, or with `initial_index` filled up to there.
      tokens_to_logits: (state) -> (logits [batch * num_decodes, vocab], new cache).
      eos_id: ends a row; it is part of the output, zeros follow it.
      decode_rng: a key for each example [batch], or one, into which the row of each is folded; None is
        `jax.random.key(0)`.
      num_decodes: how many sequences are sampled for each example.
      temperature: divides the logits; one, or one for each example [batch]. At 1e-4 and below the likeliest token is
        taken.
      topk: only the k likeliest tokens, and those as likely as the last of them; 1 takes the likeliest (of equals the
        lower one), 0 takes all. One, or one for each example.
      topp: only the fewest tokens, likeliest first, whose probabilities add up to this, and those as likely as the last
        of them; 0 takes all. One, or one for each example. With `topk`, of what it leaves; as both are rarely meant,
        they are refused together where they are Python numbers.
      cache_offset: the axis of the cache that counts rows: 1 where layers are stacked in front of it.
      initial_index: int32 [batch], the position of each row's last prompt token, where its decoding begins.
      max_decode_steps: the most tokens after the prompt; one, or one for each example; None is no limit.
      max_decode_steps_hard_limit: a positive limit to `max_decode_steps`, where that comes from a request.
      rescale_log_probs: scores are those of the distribution that was sampled from, which are 0 for greedy decoding;
        False: those of the network.
      state_callback_fn: state -> state, before every step and after the last.
      logit_callback_fn: (logits, state) -> logits, before the temperature; see `t5x.decoding.constraints`.

    Returns:
      (int32 [batch, num_decodes, length], float32 [batch, num_decodes]): tokens, and the sums of their log
      probabilities, the largest last.
    """
    batch, length = inputs.shape
    if all(isinstance(value, int | float) and value for value in (topk, topp)):
        raise UserError(f"topk={topk} and topp={topp} are both set: set topk=0 to sample by topp, or leave topp=0.")
    if isinstance(max_decode_steps, int) and max_decode_steps > length:
        raise UserError(f"max_decode_steps is {max_decode_steps}, but the targets have a length of {length}.")
    sequences, index, prompt_end = rows.begin(inputs, initial_index)
    limit = jnp.full(batch, length)
    if max_decode_steps is not None:
        if max_decode_steps_hard_limit is not None and max_decode_steps_hard_limit > 0:
            max_decode_steps = jnp.minimum(max_decode_steps, max_decode_steps_hard_limit)
        limit = jnp.minimum(limit, prompt_end + max_decode_steps)
    each_row = lambda x: jnp.repeat(x, num_decodes, axis=0)
    options = {"temperature": temperature, "topk": topk, "topp": topp}
    of_rows = {name: each_row(jnp.asarray(x))[:, None] for name, x in options.items() if jnp.ndim(x)}
    of_rows["limit"] = each_row(limit)
    keys = rows.example_keys(decode_rng, jnp.arange(batch))
    fold_in = jax.vmap(jax.random.fold_in)

    def step(
        tokens_to_logits: TokensToLogits, of_rows: dict[str, jax.Array], state: SamplingLoopState
    ) -> SamplingLoopState:
        if state_callback_fn is not None:
            state = state_callback_fn(state)
        logits, cache = tokens_to_logits(state)
        logits = logits.astype(jnp.float32)
        if logit_callback_fn is not None:
            logits = logit_callback_fn(logits, state)
        keys = fold_in(state.rng, state.cur_index)
        of = options | of_rows
        token, log_prob = _sample(logits, keys, of["temperature"], of["topk"], of["topp"], rescale_log_probs)
        following = state.cur_index + 1
        prompt = rows.token_at(state.sequences, following)
        free = (prompt == 0) & ~state.ended
        token = jnp.where(free, token, jnp.where(state.ended, 0, prompt))
        return state.replace(
            step=state.step + 1,
            cur_index=jnp.where(state.ended, state.cur_index, following),
            cur_token=token[:, None],
            cache=cache,
            sequences=jnp.where(
                state.ended[:, None], state.sequences, rows.with_token(state.sequences, following, token)
            ),
            ended=state.ended | (free & (token == state.eos_id)) | (following >= of["limit"]),
            log_prob=state.log_prob + jnp.where(free, log_prob, 0.0),
        )

    index = each_row(index)
    sequences = each_row(sequences)
    state = SamplingLoopState(
        step=jnp.int32(0),
        cur_index=index,
        cur_token=rows.token_at(sequences, index)[:, None],
        cache=rows.repeat_rows(cache, batch, num_decodes, cache_offset),
        sequences=sequences,
        prompt_end=each_row(prompt_end),
        eos_id=jnp.asarray(eos_id, jnp.int32),
        ended=index >= of_rows["limit"],
        rng=fold_in(each_row(keys), jnp.tile(jnp.arange(num_decodes), batch)),
        log_prob=jnp.zeros(batch * num_decodes),
    )

    def results(state: SamplingLoopState) -> tuple[jax.Array, jax.Array]:
        if state_callback_fn is not None:
            state = state_callback_fn(state)
        return state.sequences, state.log_prob

    sequences, log_prob = narrowing.loop(
        step,
        state,
        tokens_to_logits=tokens_to_logits,
        fixed=of_rows,
        is_open=lambda state: jnp.any(~state.ended.reshape(-1, num_decodes), axis=1),
        results=results,
        cache_rows=batch * num_decodes,
        cache_axis=cache_offset,
        may_narrow=state_callback_fn is None and narrowing.is_of_any_rows(logit_callback_fn),
    )
    scores = log_prob.reshape(batch, num_decodes)
    order = jnp.argsort(scores, axis=-1)
    tokens = sequences[:, 1:].reshape(batch, num_decodes, length)
    return rows.take_beams(tokens, order), jnp.take_along_axis(scores, order, axis=-1)


def _sample(
    logits: jax.Array, keys: jax.Array, temperature: Any, topk: Any, topp: Any, rescale_log_probs: bool
) -> tuple[jax.Array, jax.Array]:
    """(tokens int32 [rows], their log probabilities [rows]); the options are scalars or [rows, 1]."""
    log_prob_of = lambda logits, token: jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], -1)[:, 0]
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


def topk_mask(logits: jax.Array, topk: int | jax.Array) -> jax.Array:
    """NEG_INF below the k-th largest logit of a row; `topk` may be traced, and be [rows, 1]."""
    return _keep_largest(logits, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= topk)


def topp_mask(logits: jax.Array, topp: float | jax.Array) -> jax.Array:
    """NEG_INF below the logit with which probabilities, largest first, reach `topp`, which may be [rows, 1]."""
    probabilities = jax.nn.softmax(logits)
    total = lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1, keepdims=True)
    return _keep_largest(logits, lambda kept: total(kept) >= topp)


def _keep_largest(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Keeps, in every row, the logits from the greatest threshold on with which `enough` are kept.

    The threshold is found bit by bit, in 32 passes over the logits: a sort costs more, and needs all of them at once.

    Args:
      enough: bool [rows, vocab], what is kept -> bool [rows, 1]; true for more where it is true for less.
    """
    bits = jax.lax.bitcast_convert_type(logits + 0.0, jnp.uint32)  # + 0.0: no negative zero
    highest = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= highest, ~bits, bits | highest)  # as integers they order as the floats do

    def next_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (highest >> i.astype(jnp.uint32))
        return jnp.where(enough(ordered >= higher), higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros((*logits.shape[:-1], 1), jnp.uint32))
    return jnp.where(ordered >= threshold, logits, NEG_INF)
