"""T5X's masks of the largest logits, and binary search over all 32-bit numbers."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from t5x.decoding import sampling


def topk_mask(x: jax.Array, k: int | jax.Array, replace_val: float | jax.Array) -> jax.Array:
    """Replace all but the k largest values of the last axis; ties keep more."""
    return sampling.topk_mask(jnp.asarray(x, jnp.float32), k, replace_val).astype(x.dtype)


def topp_mask(logits: jax.Array, p: float | jax.Array, replace_val: float | jax.Array) -> jax.Array:
    """Replace all but the largest logits of the last axis whose probabilities reach p; ties keep more."""
    return sampling.topp_mask(jnp.asarray(logits, jnp.float32), p, replace_val).astype(logits.dtype)


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
