"""Beam search with T5X's brevity penalty or Hugging Face's length penalty."""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x._runtime.errors import ArgumentError
from t5x.decoding import limits
from t5x.decoding.loop import decoding_loop, is_row_independent
from t5x.decoding.state import (
    NEG_INF,
    DecodingState,
    LogitCallback,
    TokensToLogits,
    entry_name,
    is_eos,
    map_cache,
    repeat_rows,
    set_token,
    start_from_prompts,
    take_beams,
    token_at,
    top_k,
)

_ROW_OFFSETS = "row_offsets"  # entry of the network's cache, see `network.attention.Mask`


class _Beams(flax.struct.PyTreeNode):
    """The state of the search. The beams of an example are sorted, best first; a score of -inf marks a missing beam.

    Attributes:
      index: int32 [batch], position of the token being fed.
      open: bool [batch], whether the search of an example continues.
      live, live_log_probs: [batch, beams, length + 1] and [batch, beams], unfinished sequences.
      finished, finished_scores: the same for finished sequences.
      cache: the network's cache, one row per live beam.
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
    """Inputs that no step changes.

    Attributes:
      prompts: int32 [batch, length + 1], see `start_from_prompts`.
      prompt_end, limit: int32 [batch], last position of the prompt and of the output.
      alpha, length_penalty, min_log_prob: arguments of `beam_search`, one value or one per example.
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
    eos_id: int | jax.Array | tuple[int, ...],
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
    pad_id: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Find the best sequences with a beam of `num_decodes`.

    The score of a finished sequence is its log probability divided by ((5 + length) / 6) ** alpha; the length includes
    the prompt and EOS. Each step considers the top 2 * num_decodes continuations: those that end compete for a place
    among the finished, the rest stay live. The search of an example stops when no live beam can beat its worst finished
    one, which never changes the result. If no sequence has ended at the last position, the live beams are returned
    with their log probabilities as scores.

    Exact ties are ordered as T5X orders an example that is decoded alone: T5X stores beams worst first and reverses the
    order of equal ones in every step, so ties between continuations go to the worse beam, then to the lower token.

    With `length_penalty` the search is Hugging Face's: scores are divided by length ** length_penalty, where the length
    counts generated tokens and EOS; only endings among the top num_decodes continuations count; unfinished sequences at
    the last position count as finished; and `early_stopping` decides when the search stops.

    Args:
      inputs: int32 [batch, length], prompts shifted right: the start token at position 0, and `pad_id` wherever output
        may go. Prompts are forced and do not contribute to the scores.
      cache: the network's cache for `batch` rows: empty, or filled up to `initial_index`.
      tokens_to_logits: state -> (logits [batch * num_decodes, vocab], new cache).
      eos_id: token that ends a sequence, or a tuple of several.
      num_decodes: number of beams; all are returned.
      alpha: exponent of the brevity penalty; one value, or one per example.
      max_decode_len: maximum output length, including the prompt; None is `length`.
      max_decode_step: maximum number of tokens after the prompt; 0 or less is no limit.
      min_log_prob: beams with a log probability at or below this are dropped.
      decode_rng: unused; part of T5X's signature.
      cache_offset: row axis of the cache; 1 if it has a leading layer axis.
      initial_index: int32 [batch], position of each row's last prompt token, where decoding starts.
      length_penalty: exponent of Hugging Face's length penalty; one value, or one per example. None is T5X's search.
      early_stopping: with `length_penalty`. True: stop at num_decodes finished sequences. False: stop when the best
        live beam, scored at its current length, does not beat the worst of them. "never": the same, scored at its most
        favorable length.
      logit_callback_fn: (log probabilities, state) -> log probabilities, at most 0 and not renormalized; see
        `t5x.decoding.constraints`.
      pad_id: the padding token.

    Returns:
      int32 [batch, num_decodes, max_decode_len] and float32 [batch, num_decodes]: tokens, padded after EOS, and scores,
      best last. Missing decodes are all padding, with score NEG_INF.

    Raises:
      ArgumentError: if an option is out of range.
    """
    del decode_rng
    batch = inputs.shape[0]
    length = inputs.shape[1] if max_decode_len is None else max_decode_len
    if length > inputs.shape[1]:
        raise ArgumentError(f"max_decode_len is {length}, but the target length is {inputs.shape[1]}. Lower it.")
    if num_decodes < 1:
        raise ArgumentError(f"num_decodes is {num_decodes}; it must be at least 1.")
    if early_stopping not in (True, False, "never"):
        raise ArgumentError(f'early_stopping is {early_stopping!r}; it must be True, False or "never".')
    if early_stopping is not False and length_penalty is None:
        raise ArgumentError(f"early_stopping={early_stopping!r} needs Hugging Face's beams: set length_penalty too.")
    for name, exponent in (("alpha", alpha), ("length_penalty", length_penalty)):
        limits.check_length_exponent(name, exponent, length)
    if isinstance(min_log_prob, float) and math.isnan(min_log_prob):
        raise ArgumentError("min_log_prob is nan; it must be a number (-1e7 keeps every beam).")
    prompts, index, prompt_end = start_from_prompts(inputs[:, :length], initial_index, pad_id)
    limit = jnp.where(jnp.asarray(max_decode_step) > 0, jnp.minimum(prompt_end + max_decode_step, length), length)
    eos = jax.tree.map(lambda token: jnp.asarray(token, jnp.int32), eos_id)
    rank = jnp.arange(2 * num_decodes)
    # `top_k` prefers the first of equal values, and T5X's first beam is its worst. Hugging Face's is its best.
    is_t5x = length_penalty is None
    ties = slice(None, None, -1 if is_t5x else 1)
    beam_order = jnp.arange(num_decodes)[ties]

    def score(fixed: _Fixed, log_probs: jax.Array, position: jax.Array) -> jax.Array:
        """Score sequences [batch, n] whose last token is at `position` [batch]."""
        if fixed.length_penalty is None:
            penalty = brevity_penalty(fixed.alpha, position)
        else:
            penalty = (position - fixed.prompt_end).astype(jnp.float32) ** fixed.length_penalty
        return log_probs / penalty[:, None]

    def best_possible(fixed: _Fixed, log_prob: jax.Array, position: jax.Array) -> jax.Array:
        """Bound the score [batch, 1] that a beam at `position` can reach. Log probabilities only decrease."""
        score_at = functools.partial(score, fixed, log_prob)
        if fixed.length_penalty is None:
            return jnp.maximum(score_at(position + 1), score_at(fixed.limit))
        if early_stopping == "never":
            positive = jnp.reshape(fixed.length_penalty > 0, (-1, 1))
            return jnp.where(positive, score_at(fixed.limit), score_at(position))
        return jnp.full_like(log_prob, -jnp.inf) if early_stopping else score_at(position)

    def step(tokens_to_logits: TokensToLogits, fixed: _Fixed, beams: _Beams) -> _Beams:
        batch = beams.index.size
        live = beams.live.reshape(batch * num_decodes, -1)
        index, prompt_end = (jnp.repeat(x, num_decodes, axis=0) for x in (beams.index, fixed.prompt_end))
        state = DecodingState(index, live, token_at(live, index)[:, None], beams.cache, prompt_end, eos)
        logits, cache = tokens_to_logits(state)
        logits = logits.astype(jnp.float32)
        if logit_callback_fn is not None:
            logits = logit_callback_fn(jax.nn.log_softmax(logits), state)
        logits = logits.reshape(batch, num_decodes, -1)
        log_probs, tokens = top_k(logits, min(2 * num_decodes, logits.shape[-1]))
        if logit_callback_fn is None:  # normalize the top k only, not the whole vocabulary
            top = log_probs[..., :1]
            log_probs = (log_probs - top) - jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))
        totals = beams.live_log_probs[..., None] + log_probs
        totals = jnp.where(totals > fixed.min_log_prob, totals, -jnp.inf)
        candidates, chosen = top_k(totals[:, ties].reshape(batch, -1), 2 * num_decodes)
        parents = beam_order[chosen // tokens.shape[-1]]
        tokens = jnp.take_along_axis(tokens[:, ties].reshape(batch, -1), chosen, axis=1)

        following = beams.index + 1
        prompt = token_at(fixed.prompts, following)[:, None]
        forced = prompt != pad_id
        candidates = jnp.where(forced, jnp.where(rank == 0, beams.live_log_probs[:, :1], -jnp.inf), candidates)
        tokens, parents = jnp.where(forced, prompt, tokens), jnp.where(forced, 0, parents)
        grown = set_token(take_beams(beams.live, parents), following[:, None], tokens)

        ends = finishing = is_eos(tokens, eos) & ~forced
        if not is_t5x:
            finishing = (ends | (following >= fixed.limit)[:, None]) & (rank < num_decodes)
        ended = jnp.where(finishing, score(fixed, candidates, following), -jnp.inf)
        all_scores = jnp.concatenate([beams.finished_scores[:, ties], ended], axis=1)
        finished_scores, chosen = top_k(all_scores, num_decodes)
        finished = take_beams(jnp.concatenate([beams.finished[:, ties], grown], axis=1), chosen)

        live_log_probs, chosen = top_k(jnp.where(ends, -jnp.inf, candidates), num_decodes)
        if num_decodes > 1:
            cache = _reorder_cache(cache, take_beams(parents, chosen), beams.index, cache_offset)
        best = live_log_probs[:, :1]
        worst = finished_scores[:, -1:]  # -inf until there are enough
        is_better = jnp.greater_equal if is_t5x else jnp.greater
        improves = (best > -jnp.inf) & (jnp.isneginf(worst) | is_better(best_possible(fixed, best, following), worst))

        def if_open(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(beams.open.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return beams.replace(
            index=if_open(following, beams.index),
            open=beams.open & (following < fixed.limit) & improves[:, 0],
            live=if_open(take_beams(grown, chosen), beams.live),
            live_log_probs=if_open(live_log_probs, beams.live_log_probs),
            finished=if_open(finished, beams.finished),
            finished_scores=if_open(finished_scores, beams.finished_scores),
            cache=cache,
        )

    start = jnp.repeat(prompts[:, None], num_decodes, axis=1)
    missing = jnp.full((batch, num_decodes), -jnp.inf)
    beams = _Beams(index, index < limit, start, missing.at[:, 0].set(0.0), jnp.zeros_like(start), missing, None)
    cache = repeat_rows(cache, batch, num_decodes, cache_offset)
    beams = beams.replace(cache=_with_row_offsets(cache, inputs.shape[1]) if num_decodes > 1 else cache)
    number = functools.partial(jnp.asarray, dtype=jnp.float32)
    penalty = None if length_penalty is None else number(length_penalty)
    live, live_log_probs, finished, finished_scores = decoding_loop(
        step,
        beams,
        tokens_to_logits=tokens_to_logits,
        fixed=_Fixed(prompts, prompt_end, limit, number(alpha), penalty, number(min_log_prob)),
        is_open=lambda beams: beams.open,
        results=lambda beams: (beams.live, beams.live_log_probs, beams.finished, beams.finished_scores),
        cache_rows=batch * num_decodes,
        cache_axis=cache_offset,
        may_shrink=is_row_independent(logit_callback_fn),
    )
    none_ended = jnp.isneginf(finished_scores[:, :1])
    tokens = jnp.where(none_ended[..., None], live, finished)
    scores = jnp.where(none_ended, live_log_probs, finished_scores)
    exists = scores > -jnp.inf
    tokens, scores = jnp.where(exists[..., None], tokens, pad_id), jnp.where(exists, scores, NEG_INF)
    return tokens[:, ::-1, 1:], scores[:, ::-1]


def brevity_penalty(alpha: float | jax.Array, length: int | jax.Array) -> jax.Array:
    """Return ((5 + length) / 6) ** alpha, which divides the log probability of a sequence."""
    return ((5.0 + length) / 6.0) ** alpha


def _with_row_offsets(cache: Any, length: int) -> Any:
    """Replace the network's entry `row_offsets` [rows, 1], if there is one, by zeros [rows, length]."""

    def fill(path: tuple, x: jax.Array) -> jax.Array:
        return jnp.zeros((x.shape[0], length), x.dtype) if entry_name(path) == _ROW_OFFSETS else x

    return jax.tree_util.tree_map_with_path(fill, cache)


def _reorder_cache(cache: Any, parents: jax.Array, index: jax.Array, axis: int) -> Any:
    """Give every beam [batch, beams] the cache rows of its parent.

    With `row_offsets` in the cache, keys and values stay where they are: a beam's offsets say which rows hold them.

    Args:
      index: int [batch], the position that was just written, by each row in its own place.
    """
    batch, beams = parents.shape

    def take(x: jax.Array) -> jax.Array:
        return take_beams(x.reshape(batch, beams, *x.shape[1:]), parents).reshape(x.shape)

    names = {entry_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
    if _ROW_OFFSETS not in names:
        for _ in range(axis):
            take = jax.vmap(take)
        return map_cache(take, cache, batch * beams, axis)

    def follow(offsets: jax.Array) -> jax.Array:
        moved = jnp.where(jnp.arange(offsets.shape[1]) < jnp.repeat(index, beams)[:, None], offsets, 0)
        return take(moved) + (parents - jnp.arange(beams)).reshape(-1, 1)

    return jax.tree_util.tree_map_with_path(lambda path, x: follow(x) if entry_name(path) == _ROW_OFFSETS else x, cache)
