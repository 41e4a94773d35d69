"""T5X's operations on beams and caches, for custom decode functions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp

from t5x.decoding.sampling import temperature_sample
from t5x.decoding.state import NEG_INF, SHARED_CACHE_ENTRIES, take_beams, top_k


def add_beam_dim(x: jax.Array, beam_size: int, offset: int = 0) -> jax.Array:
    """Repeat an array along a new axis of beams after the batch axis `offset`; scalars are unchanged."""
    if x.ndim == 0:
        return x
    return jnp.repeat(jnp.expand_dims(x, offset + 1), beam_size, axis=offset + 1)


def flatten_beam_dim(x: jax.Array, offset: int = 0) -> jax.Array:
    """Join the axes `offset` and `offset + 1`, batch and beams; scalars are unchanged."""
    if x.ndim == 0:
        return x
    return x.reshape(*x.shape[:offset], -1, *x.shape[offset + 2 :])


def unflatten_beam_dim(x: jax.Array, batch_size: int, beam_size: int, offset: int = 0) -> jax.Array:
    """Split the axis `offset` into batch and beams; scalars are unchanged."""
    if x.ndim == 0:
        return x
    if x.shape[offset] != batch_size * beam_size:
        raise AssertionError(f"axis {offset} of {x.shape} is not {batch_size} * {beam_size} long")
    return x.reshape(*x.shape[:offset], batch_size, beam_size, *x.shape[offset + 1 :])


def flat_batch_beam_expand(x: jax.Array, beam_size: int, offset: int = 0) -> jax.Array:
    """Repeat every row of the axis `offset` `beam_size` times, next to each other."""
    return flatten_beam_dim(add_beam_dim(x, beam_size, offset), offset)


def cache_map(fn: Callable[[jax.Array], jax.Array], cache: Any, apply_to_index: bool = False) -> Any:
    """Apply `fn` to every entry of a cache that has rows.

    Args:
      apply_to_index: whether `cache_index` has them too, as in a cache that was filled by prompts of several lengths.
    """
    flat = flax.traverse_util.flatten_dict(cache)
    skipped = SHARED_CACHE_ENTRIES if apply_to_index else ("cache_index", *SHARED_CACHE_ENTRIES)
    return flax.traverse_util.unflatten_dict({path: x if path[-1] in skipped else fn(x) for path, x in flat.items()})


def gather_beams(
    nested: Any, beam_indices: jax.Array, batch_size: int, old_beam_size: int, new_beam_size: int, one_hot: bool = True
) -> Any:
    """Take beams of arrays [batch, old beams, ...] by indices [batch, new beams]; scalars are unchanged.

    Args:
      one_hot: no effect; T5X chooses by it how TPUs gather.
    """
    return jax.tree.map(lambda x: x if x.ndim == 0 else take_beams(x, beam_indices), nested)


def cache_gather_beams(
    nested: Any,
    beam_indices: jax.Array,
    batch_size: int,
    old_beam_size: int,
    new_beam_size: int,
    one_hot: bool = True,
    offset: int = 0,
) -> Any:
    """Take beams of a cache whose batch and beam axes are `offset` and `offset + 1`; see `gather_beams`."""
    take = functools.partial(take_beams, beams=beam_indices)
    for _ in range(offset):
        take = jax.vmap(take)
    return cache_map(lambda x: x if x.ndim == 0 else take(x), nested)


def gather_topk_beams(nested: Any, score_or_log_prob: jax.Array, batch_size: int, new_beam_size: int) -> Any:
    """Take the beams with the highest scores [batch, old beams], best first."""
    _, best = jax.lax.top_k(score_or_log_prob, new_beam_size)
    return gather_beams(nested, best, batch_size, score_or_log_prob.shape[1], new_beam_size)


def top_k_two_stage(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Compute `jax.lax.top_k` over the last axis, which may be long."""
    return top_k(x, k)


@flax.struct.dataclass
class BeamState:
    """The state of a beam search.

    Attributes:
      cur_index: position of the token being fed.
      live_logprobs, live_seqs: [batch, beams] and [batch, beams, length], unfinished sequences.
      finished_scores, finished_seqs, finished_flags: the same for finished sequences, and which of them exist.
      cache: the network's cache with an axis of beams.
      initial_index: where decoding started, int [batch], or None.
    """

    cur_index: jax.Array
    live_logprobs: jax.Array
    finished_scores: jax.Array
    live_seqs: jax.Array
    finished_seqs: jax.Array
    finished_flags: jax.Array
    cache: Any
    initial_index: jax.Array | None


def beam_init(
    batch_size: int,
    beam_size: int,
    max_decode_len: int,
    cache: Any,
    offset: int = 0,
    live_seqs: jax.Array | None = None,
    initial_index: jax.Array | None = None,
) -> BeamState:
    """Return the state before the first step: one live beam of probability 1, and nothing finished."""
    empty = jnp.zeros((batch_size, beam_size, max_decode_len), jnp.int32)
    missing = jnp.full((batch_size, beam_size), NEG_INF)
    expand = functools.partial(add_beam_dim, beam_size=beam_size, offset=offset)
    return BeamState(
        cur_index=jnp.zeros((batch_size,), jnp.int32) if initial_index is None else initial_index,
        live_logprobs=missing.at[:, 0].set(0.0),
        finished_scores=missing,
        live_seqs=empty if live_seqs is None else live_seqs,
        finished_seqs=empty,
        finished_flags=jnp.zeros((batch_size, beam_size), bool),
        cache=cache_map(expand, cache, apply_to_index=initial_index is not None),
        initial_index=initial_index,
    )


def _temperature_sample_single_trial(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: Callable[..., Any],
    eos_id: int,
    prng_key: jax.Array,
    num_decodes: int = 1,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Sample one sequence per row of `inputs` [rows, length]; return tokens [rows, length] and log probs [rows].

    Args:
      options: other arguments of `temperature_sample`.
    """
    options = {"topk": 20, **options}
    tokens, scores = temperature_sample(inputs, cache, tokens_to_logits, eos_id, prng_key, 1, **options)
    return tokens[:, 0], scores[:, 0]


def _dynamic_update_vector_slice_in_dim(
    operand: jax.Array, update: jax.Array, start_index: jax.Array, axis: int, *, allow_negative_indices: bool = True
) -> jax.Array:
    """Update a slice of each row at a position of its own; `axis` counts without the row axis."""
    change = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
    return jax.vmap(change)(operand, update, start_index)


def _is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def int32_bsearch(batch_shape: Sequence[int], predicate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the largest int32 for which a monotonic predicate is False, for each element of a batch.

    Args:
      batch_shape: shape of the batch.
      predicate: int32 [batch_shape] -> bool [batch_shape]; False up to some number, and True above it. If it is always
        True, the result is the smallest int32.
    """

    # Flipping the sign bit turns the order of int32 into that of uint32, searched from the highest bit down.
    def as_int32(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)

    def next_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(predicate(as_int32(higher)), threshold, higher)

    return as_int32(jax.lax.fori_loop(0, 32, next_bit, jnp.zeros(batch_shape, jnp.uint32)))


def float32_bsearch(batch_shape: Sequence[int], predicate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the largest finite float32 for which a monotonic predicate is False; see `int32_bsearch`."""

    def as_float(x: jax.Array) -> jax.Array:
        bits = jnp.where(x < 0, x ^ jnp.int32(2**31 - 1), x)  # negative floats are ordered backwards
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def int32_predicate(x: jax.Array) -> jax.Array:
        number = as_float(x)
        return jnp.where(jnp.isfinite(number), predicate(number), x >= 0)

    return as_float(int32_bsearch(batch_shape, int32_predicate))
