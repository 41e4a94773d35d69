"""Beam search: the best finished sequences under T5X's brevity penalty or Hugging Face's length penalty."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x.decoding import narrowing
from t5x.decoding import state as rows
from t5x.decoding.state import NEG_INF, DecodingState, LogitCallback, TokensToLogits
from t5x.errors import UserError


@flax.struct.dataclass
class _Beams:
    """The search so far. Beams of an example are sorted, best first; -inf marks one that is not there.

    Attributes:
      index: int32 [batch], position of the token being fed.
      open: bool [batch], whether the search of an example goes on.
      live, live_log_probs: [batch, beams, length + 1] and [batch, beams].
      finished, finished_scores: the same of sequences that have ended.
      cache: the network's, with a row for each live beam.
    """

    index: jax.Array
    open: jax.Array
    live: jax.Array
    live_log_probs: jax.Array
    finished: jax.Array
    finished_scores: jax.Array
    cache: Any


@flax.struct.dataclass
class _Fixed:
    """What stays as it is.

    Attributes:
      prompts: int32 [batch, length + 1], as `state.begin` gives them.
      prompt_end, limit: int32 [batch], where the prompt ends, and where the output must.
      alpha, length_penalty, min_log_prob: as given, for all examples or each.
    """

    prompts: jax.Array
    prompt_end: jax.Array
    limit: jax.Array
    alpha: jax.Array
    length_penalty: jax.Array | None
    min_log_prob: jax.Array


def beam_search(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int | jax.Array,
    num_decodes: int = 4,
    alpha: float | jax.Array = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int | jax.Array = -1,
    min_log_prob: float | jax.Array = NEG_INF,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
    length_penalty: float | jax.Array | None = None,
    early_stopping: bool | str = False,
    logit_callback_fn: LogitCallback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The best sequences that a beam of `num_decodes` finds.

    The score of a finished sequence is its log probability divided by ((5 + length) / 6) ** alpha, where the length
    counts its prompt and EOS. Each step looks at the 2 * num_decodes likeliest continuations: those that end compete
    for a place among the finished, the rest go on. An example's search ends when no live beam can still get better
    than its worst finished one, which never changes the result. Where nothing has ended at the last position, the live
    beams are the result, with their log probabilities as scores.

    Ties: of equally likely continuations the one of the better beam goes first, then the lower token; of equal scores
    the sequence that ended first, and of those the one whose last continuation went first.

    With `length_penalty` it is the search of Hugging Face: scores are divided by length ** length_penalty, where the
    length counts what was generated with its EOS; only endings among the num_decodes likeliest continuations count;
    what is unfinished at the last position counts as finished; and the search ends by `early_stopping`.

    Args:
      inputs: int32 [batch, length], the prompts, shifted right: 0 at position 0, and wherever the output may go. They
        are forced, and their log probability is not counted.
      cache: the network's cache for `batch` rows: empty, or with `initial_index` filled up to there.
      tokens_to_logits: (state) -> (logits [batch * num_decodes, vocab], new cache).
      num_decodes: the number of beams, all of which are returned.
      max_decode_len: the longest output, with its prompt; None is `length`.
      max_decode_step: the most tokens after the prompt; 0 and less mean no limit.
      min_log_prob: beams that are not likelier than this are given up.
      decode_rng: of T5X's signature; nothing here is random.
      cache_offset: the axis of the cache that counts rows: 1 where layers are stacked in front of it.
      initial_index: int32 [batch], the position of each row's last prompt token, where its decoding begins.
      early_stopping: with `length_penalty`. True: end with num_decodes finished sequences. False: end when the best
        live beam, scored at its present length, is not better than the worst of them. "never": the same, scored at the
        length that suits it best.
      logit_callback_fn: (log probabilities, state) -> log probabilities, none above 0, without normalising again; see
        `t5x.decoding.constraints`.

    Returns:
      (int32 [batch, num_decodes, max_decode_len], float32 [batch, num_decodes]): tokens with zeros after EOS, and
      scores, the best last. Zeros with a score of -1e7 where fewer sequences have ended than were asked for.
    """
    del decode_rng
    batch = inputs.shape[0]
    length = inputs.shape[1] if max_decode_len is None else max_decode_len
    if length > inputs.shape[1]:
        raise UserError(f"max_decode_len is {length}, but the targets have a length of {inputs.shape[1]}.")
    if num_decodes < 1:
        raise UserError(f"num_decodes is {num_decodes}: it must be at least 1.")
    if early_stopping not in (True, False, "never"):
        raise UserError(f'early_stopping is {early_stopping!r}: it must be True, False or "never".')
    if early_stopping is not False and length_penalty is None:
        raise UserError("early_stopping is an option of Hugging Face's search: set length_penalty too.")
    prompts, index, prompt_end = rows.begin(inputs[:, :length], initial_index)
    limit = jnp.where(jnp.asarray(max_decode_step) > 0, jnp.minimum(prompt_end + max_decode_step, length), length)
    eos_id = jnp.asarray(eos_id, jnp.int32)
    each_row = lambda x: jnp.repeat(x, num_decodes, axis=0)
    rank = jnp.arange(2 * num_decodes)

    def score(fixed: _Fixed, log_probs: jax.Array, position: jax.Array) -> jax.Array:
        """Of sequences [batch, n] whose last token stands at `position` [batch]."""
        if length_penalty is None:
            penalty = ((5.0 + position) / 6.0) ** fixed.alpha
        else:
            penalty = (position - fixed.prompt_end).astype(jnp.float32) ** fixed.length_penalty
        return log_probs / penalty[:, None]

    def best_possible(fixed: _Fixed, log_prob: jax.Array, position: jax.Array) -> jax.Array:
        """The score [batch, 1] that a beam at `position` may still get. Log probabilities only fall."""
        at = functools.partial(score, fixed, log_prob)
        if length_penalty is None:
            return jnp.maximum(at(position + 1), at(fixed.limit))
        if early_stopping == "never":
            positive = jnp.reshape(fixed.length_penalty > 0, (-1, 1))
            return jnp.where(positive, at(fixed.limit), at(position))
        return jnp.full_like(log_prob, -jnp.inf) if early_stopping else at(position)

    def step(tokens_to_logits: TokensToLogits, fixed: _Fixed, beams: _Beams) -> _Beams:
        batch = beams.index.size
        live = beams.live.reshape(batch * num_decodes, -1)
        at, prompt_end = each_row(beams.index), each_row(fixed.prompt_end)
        state = DecodingState(at, rows.token_at(live, at)[:, None], beams.cache, live, prompt_end, eos_id)
        logits, cache = tokens_to_logits(state)
        logits = logits.astype(jnp.float32)
        if logit_callback_fn is not None:
            logits = logit_callback_fn(jax.nn.log_softmax(logits), state)
        logits = logits.reshape(batch, num_decodes, -1)
        log_probs, tokens = rows.top_k(logits, min(2 * num_decodes, logits.shape[-1]))
        if logit_callback_fn is None:  # the likeliest are found first, and only they become log probabilities
            top = log_probs[..., :1]
            log_probs = (log_probs - top) - jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))
        of_beam = beams.live_log_probs[..., None] + log_probs
        of_beam = jnp.where(of_beam > fixed.min_log_prob, of_beam, -jnp.inf)
        candidates, chosen = jax.lax.top_k(of_beam.reshape(batch, -1), 2 * num_decodes)
        parents = chosen // tokens.shape[-1]
        tokens = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)

        following = beams.index + 1
        prompt = rows.token_at(fixed.prompts, following)[:, None]
        forced = prompt != 0
        candidates = jnp.where(forced, jnp.where(rank == 0, beams.live_log_probs[:, :1], -jnp.inf), candidates)
        tokens, parents = jnp.where(forced, prompt, tokens), jnp.where(forced, 0, parents)
        grown = rows.with_token(rows.take_beams(beams.live, parents), following[:, None], tokens)

        ends = (tokens == eos_id) & ~forced
        finishing = ends
        if length_penalty is not None:
            finishing = (ends | (following >= fixed.limit)[:, None]) & (rank < num_decodes)
        ended = jnp.where(finishing, score(fixed, candidates, following), -jnp.inf)
        finished_scores, chosen = jax.lax.top_k(jnp.concatenate([beams.finished_scores, ended], 1), num_decodes)
        finished = rows.take_beams(jnp.concatenate([beams.finished, grown], axis=1), chosen)

        live_log_probs, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, candidates), num_decodes)
        if num_decodes > 1:
            cache = _reordered(cache, rows.take_beams(parents, chosen), cache_offset)
        best = live_log_probs[:, :1]
        worst = finished_scores[:, -1:]  # -inf where there are not yet enough
        improves = (best > -jnp.inf) & (jnp.isneginf(worst) | (best_possible(fixed, best, following) > worst))
        still = lambda new, old: jnp.where(beams.open.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        return beams.replace(
            index=still(following, beams.index),
            open=beams.open & (following < fixed.limit) & improves[:, 0],
            live=still(rows.take_beams(grown, chosen), beams.live),
            live_log_probs=still(live_log_probs, beams.live_log_probs),
            finished=still(finished, beams.finished),
            finished_scores=still(finished_scores, beams.finished_scores),
            cache=cache,
        )

    start = jnp.repeat(prompts[:, None], num_decodes, axis=1)
    nothing = jnp.full((batch, num_decodes), -jnp.inf)
    beams = _Beams(
        index=index,
        open=index < limit,
        live=start,
        live_log_probs=nothing.at[:, 0].set(0.0),
        finished=jnp.zeros_like(start),
        finished_scores=nothing,
        cache=rows.repeat_rows(cache, batch, num_decodes, cache_offset),
    )
    as_array = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
    fixed = _Fixed(prompts, prompt_end, limit, as_array(alpha), as_array(length_penalty), as_array(min_log_prob))
    live, live_log_probs, finished, finished_scores = narrowing.loop(
        step,
        beams,
        tokens_to_logits=tokens_to_logits,
        fixed=fixed,
        is_open=lambda beams: beams.open,
        results=lambda beams: (beams.live, beams.live_log_probs, beams.finished, beams.finished_scores),
        cache_rows=batch * num_decodes,
        cache_axis=cache_offset,
        may_narrow=narrowing.is_of_any_rows(logit_callback_fn),
    )
    none_ended = jnp.isneginf(finished_scores[:, :1])
    tokens = jnp.where(none_ended[..., None], live, finished)
    scores = jnp.where(none_ended, live_log_probs, finished_scores)
    there = scores > -jnp.inf
    tokens, scores = jnp.where(there[..., None], tokens, 0), jnp.where(there, scores, NEG_INF)
    return tokens[:, ::-1, 1:], scores[:, ::-1]


def _reordered(cache: Any, parents: jax.Array, axis: int) -> Any:
    """The cache after every beam [batch, beams] has taken the rows of its parent."""
    batch, beams = parents.shape

    def take(x: jax.Array) -> jax.Array:
        return rows.take_beams(x.reshape(batch, beams, *x.shape[1:]), parents).reshape(x.shape)

    for _ in range(axis):
        take = jax.vmap(take)
    return rows.map_rows(take, cache, batch * beams, axis)
