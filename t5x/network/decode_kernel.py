"""A Pallas kernel for the attention of a decoding step: reads every cached key and value that is needed once.

XLA takes three passes per layer (logits, softmax, weighted sum) and reads the whole cache, also behind the position.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x.network.flash_kernels import LOG2E, MASKED

_PROGRAMS = 128  # below, a GPU is not filled, and XLA is faster
_QUERIES = 16  # the least number of rows that a GPU's matrix units multiply
_KEYS = 64


def fits(query: jax.Array, key: jax.Array) -> bool:
    """Return whether the kernel takes these arrays, and is faster; see `attend_step`."""
    head_dim = query.shape[-1]
    return (
        query.dtype == key.dtype in (jnp.bfloat16, jnp.float16)
        and key.shape[0] * key.shape[1] >= _PROGRAMS
        and query.shape[1] <= _QUERIES
        and key.shape[2] % 16 == 0
        and 16 <= head_dim <= 128
        and head_dim.bit_count() == 1
    )


def attend_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    seen: jax.Array | None = None,
    position: jax.Array | None = None,
    bias: jax.Array | None = None,
    offsets: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return softmax(q·k + bias, where allowed) v for the queries of a decoding step; see `fits`.

    Args:
      query: [rows, queries, heads, head_dim].
      key, value: [rows, heads, k, head_dim].
      seen: int [rows, k]; keys where it is 0 are hidden.
      position: int, scalar or [rows]; later keys are hidden.
      bias: float32 [heads, k] or [rows, heads, k].
      offsets: int32 [rows, k]; keys and values of row i before the position are those of row i + offsets[i, k].
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    rows, queries, heads, head_dim = query.shape
    length = key.shape[2]
    limits = jnp.full(1, length, jnp.int32) if position is None else (position.reshape(-1) + 1).astype(jnp.int32)
    several = limits.size > 1
    vector = pl.BlockSpec((None, length), lambda i, h: (i, 0))
    if offsets is None:
        cache = pl.BlockSpec((None, None, length, head_dim), lambda i, h: (i, h, 0, 0))
    else:
        cache = pl.BlockSpec((rows, None, length, head_dim), lambda i, h: (0, h, 0, 0))
    bias_spec = None
    if bias is not None:
        each = bias.ndim == 3
        bias = bias.reshape(-1, heads, length).astype(jnp.float32)
        bias_spec = pl.BlockSpec((None, None, length), lambda i, h: (i if each else 0, h, 0))
    row = pl.BlockSpec((None, queries, None, head_dim), lambda i, h: (i, 0, h, 0))
    return pl.pallas_call(
        functools.partial(_step_kernel, block=math.gcd(length, _KEYS)), grid=(rows, heads),
        in_specs=(row, cache, cache, None if seen is None else vector,
                  pl.BlockSpec((None,), lambda i, h: (i if several else 0,)), bias_spec,
                  None if offsets is None else vector),
        out_specs=row, out_shape=jax.ShapeDtypeStruct(query.shape, value.dtype), interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(query, key, value, seen, limits, bias, offsets)  # fmt: skip


def _step_kernel(query_ref, key_ref, value_ref, seen_ref, limit_ref, bias_ref, offsets_ref, out_ref, *, block: int):
    """Compute the outputs of one row and head."""
    # Rows beyond the last query repeat it, and are written to its place.
    numbers = jnp.minimum(lax.iota(jnp.int32, _QUERIES), query_ref.shape[0] - 1)
    query = query_ref[numbers, :]
    limit, row = limit_ref[...], pl.program_id(0)

    def load(ref: Any, at: jax.Array) -> jax.Array:
        if offsets_ref is None:
            return ref[pl.ds(at, block), :]
        numbers = at + lax.iota(jnp.int32, block)
        return ref[row + jnp.where(numbers < limit - 1, offsets_ref[pl.ds(at, block)], 0), numbers, :]

    def visit(j, carry):
        total, highest, weight = carry
        at = j * block
        keys = pl.ds(at, block)
        transposed = (((1,), (1,)), ((), ()))
        logits = LOG2E * lax.dot_general(query, load(key_ref, at), transposed, preferred_element_type=jnp.float32)
        if bias_ref is not None:
            logits += LOG2E * bias_ref[keys][None, :]
        allowed = at + lax.iota(jnp.int32, block) < limit
        if seen_ref is not None:
            allowed &= seen_ref[keys] > 0
        logits = jnp.where(allowed[None, :], logits, MASKED)
        new = jnp.maximum(highest, logits.max(axis=1))
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(logits - new[:, None])
        value = load(value_ref, at)
        added = jnp.dot(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        total = total * shrink[:, None] + added
        return total, new, weight * shrink + weights.sum(axis=1)

    zeros = jnp.zeros(_QUERIES, jnp.float32)
    carry = jnp.zeros((_QUERIES, query_ref.shape[1]), jnp.float32), zeros + MASKED, zeros
    total, _, weight = lax.fori_loop(0, pl.cdiv(limit, block), visit, carry)
    out_ref[numbers, :] = (total / weight[:, None]).astype(out_ref.dtype)
