"""Pallas kernels for the attention of a decoding step: they read every cached key and value that is needed once.

XLA takes three passes per layer (logits, softmax, weighted sum), reads the whole cache, also behind the position, and
writes the new key and value in kernels of their own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x.kernels.flash_kernels import LOG2E, MASKED

_PROGRAMS = 128  # below, a GPU is not filled, and XLA is faster
_QUERIES = 16  # the least number of rows that a GPU's matrix units multiply
_KEYS, _OWN_KEYS = 32, 16  # in a block, of an encoder's output and of the decoder


def fits(queries: int, dtype: Any, cache: jax.Array) -> bool:
    """Return whether the kernels take a cache [rows, heads, k, head_dim] and this number of queries, and are faster."""
    rows, heads, length, head_dim = cache.shape
    return (
        dtype == cache.dtype in (jnp.bfloat16, jnp.float16)
        and rows * heads >= _PROGRAMS
        and queries <= _QUERIES
        and length % 16 == 0
        and 16 <= head_dim <= 128
        and head_dim.bit_count() == 1
    )


def attend_step(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array | None = None, *, interpret: bool = False
) -> jax.Array:
    """Return softmax(q·k, where seen) v for few queries; see `fits`.

    Args:
      query: [rows, queries, heads, head_dim].
      key, value: [rows, heads, k, head_dim].
      seen: int [rows, k]; keys where it is 0 are hidden.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    rows, queries, heads, head_dim = query.shape
    length = key.shape[2]
    cache = pl.BlockSpec((None, None, length, head_dim), lambda i, h: (i, h, 0, 0))
    row = pl.BlockSpec((None, queries, None, head_dim), lambda i, h: (i, 0, h, 0))
    return pl.pallas_call(
        functools.partial(_attend_kernel, block=math.gcd(length, _KEYS)), grid=(rows, heads),
        in_specs=(row, cache, cache, None if seen is None else pl.BlockSpec((None, length), lambda i, h: (i, 0))),
        out_specs=row, out_shape=jax.ShapeDtypeStruct(query.shape, value.dtype), interpret=interpret,
        compiler_params=_compiler_params(head_dim),
    )(query, key, value, seen)  # fmt: skip


def extend_and_attend(
    new: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position: jax.Array,
    bias: jax.Array | None = None,
    offsets: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the new key and value at the position; return softmax(q·k + bias) v up to there, and both caches.

    Args:
      new: [rows, 3, heads, head_dim]: query, key and value of the position.
      key, value: [rows, heads, k, head_dim]; see `fits`.
      position: int, scalar or [rows].
      bias: float32 [heads, k] or [rows, heads, k].
      offsets: int32 [rows, k]; keys and values of row i before the position are those of row i + offsets[i, k].
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.

    Returns:
      [rows, heads, head_dim], and the caches, which are updated in place if the caller does not use the old ones.
    """
    rows, _, heads, head_dim = new.shape
    length = key.shape[2]
    own = pl.BlockSpec((None, None, length, head_dim), lambda i, h: (i, h, 0, 0))
    of_beams = pl.BlockSpec((rows, None, length, head_dim), lambda i, h: (0, h, 0, 0))
    cache = own if offsets is None else of_beams
    position = position.reshape(-1).astype(jnp.int32)
    several = position.size > 1
    bias_spec = None
    if bias is not None:
        each = bias.ndim == 3
        bias = bias.reshape(-1, heads, length).astype(jnp.float32)
        bias_spec = pl.BlockSpec((None, None, length), lambda i, h: (i if each else 0, h, 0))
    out, key, value = pl.pallas_call(
        functools.partial(_extend_kernel, block=math.gcd(length, _OWN_KEYS)), grid=(rows, heads),
        in_specs=(pl.BlockSpec((None, 3, None, head_dim), lambda i, h: (i, 0, h, 0)), cache, cache,
                  pl.BlockSpec((None,), lambda i, h: (i if several else 0,)), bias_spec,
                  None if offsets is None else pl.BlockSpec((None, length), lambda i, h: (i, 0))),
        out_specs=(pl.BlockSpec((None, None, head_dim), lambda i, h: (i, h, 0)), own, own),
        out_shape=(jax.ShapeDtypeStruct((rows, heads, head_dim), value.dtype),
                   jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        input_output_aliases={1: 1, 2: 2}, interpret=interpret,
        compiler_params=_compiler_params(head_dim),
    )(new, key, value, position, bias, offsets)  # fmt: skip
    return out, key, value


def _compiler_params(head_dim: int) -> triton.CompilerParams:
    """Return the fastest options measured (H200, 64 rows of 12 heads of 64, 512 keys): a single warp never waits."""
    return triton.CompilerParams(num_warps=max(1, head_dim // 64), num_stages=3)


def _attend_kernel(query_ref, key_ref, value_ref, seen_ref, out_ref, *, block: int):
    """Compute the outputs of one row and head."""
    # Rows beyond the last query repeat it, and are written to its place.
    numbers = jnp.minimum(lax.iota(jnp.int32, _QUERIES), query_ref.shape[0] - 1)

    def masked(logits, start):
        if seen_ref is None:
            return logits
        return jnp.where((seen_ref[pl.ds(start, block)] > 0)[None, :], logits, MASKED)

    def load(ref, start):
        return ref[pl.ds(start, block), :]

    zeros = jnp.zeros(_QUERIES, jnp.float32)
    carry = jnp.zeros((_QUERIES, query_ref.shape[1]), jnp.float32), zeros + MASKED, zeros
    out = _attend(query_ref[numbers, :], load, key_ref, value_ref, key_ref.shape[0], block, masked, carry)
    out_ref[numbers, :] = out.astype(out_ref.dtype)


def _extend_kernel(
    new_ref, key_ref, value_ref, position_ref, bias_ref, offsets_ref, out_ref, new_key_ref, new_value_ref, *, block: int
):
    """Compute the output of one row and head, and write its key and value."""
    position, row = position_ref[...], pl.program_id(0)
    query, key, value = (new_ref[n, :] for n in range(3))
    new_key_ref[position, :] = key
    new_value_ref[position, :] = value

    def load(ref, start):
        if offsets_ref is None:
            return ref[pl.ds(start, block), :]
        numbers = start + lax.iota(jnp.int32, block)
        return ref[row + jnp.where(numbers < position, offsets_ref[pl.ds(start, block)], 0), numbers, :]

    def masked(logits, start):
        if bias_ref is not None:
            logits += LOG2E * bias_ref[pl.ds(start, block)][None, :]
        return jnp.where((start + lax.iota(jnp.int32, block) < position)[None, :], logits, MASKED)

    # The position itself comes first, from registers: what was just written may not be readable yet.
    logit = LOG2E * jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32))
    if bias_ref is not None:
        logit += LOG2E * bias_ref[position]
    ones = jnp.ones(_QUERIES, jnp.float32)
    carry = jnp.broadcast_to(value.astype(jnp.float32)[None, :], (_QUERIES, value.size)), logit * ones, ones
    queries = jnp.broadcast_to(query[None, :], (_QUERIES, query.size))
    out = _attend(queries, load, key_ref, value_ref, position, block, masked, carry)
    out_ref[...] = jnp.max(out, axis=0).astype(out_ref.dtype)  # all rows are the same


def _attend(
    query: jax.Array,
    load: Callable[[Any, Any], jax.Array],
    key_ref: Any,
    value_ref: Any,
    stop: Any,
    block: int,
    masked: Callable[[jax.Array, Any], jax.Array],
    carry: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Return the weighted means of the values before `stop`.

    Args:
      load: (reference, start) -> a block of keys or values.
      masked: (logits in base 2, start) -> the same with bias and mask.
      carry: weighted sum of values, highest logit, and sum of weights so far, of each query.
    """

    def visit(j, carry):
        total, highest, weight = carry
        start = j * block
        transposed = (((1,), (1,)), ((), ()))
        logits = lax.dot_general(query, load(key_ref, start), transposed, preferred_element_type=jnp.float32)
        logits = masked(LOG2E * logits, start)
        new = jnp.maximum(highest, logits.max(axis=1))
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(logits - new[:, None])
        value = load(value_ref, start)
        added = jnp.dot(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        total = total * shrink[:, None] + added
        return total, new, weight * shrink + weights.sum(axis=1)

    total, _, weight = lax.fori_loop(0, pl.cdiv(stop, block), visit, carry)
    return total / weight[:, None]
