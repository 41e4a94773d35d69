"""Pallas kernels for GPUs: T5's layer norm, and its gradient, in one pass over memory each. XLA takes two and three.

Sums have a fixed order, so results are bitwise repeatable.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x.kernels.ops import rounded
from t5x.partitioning.logical import on_each_device

_MAX_CHUNK, _MIN_CHUNK = 1024, 128  # features that are loaded at once
_VALUES, _WARPS = 4096, 4  # a block has this many values at most
_GRADIENT_ROWS = 16  # that one program sums for the gradient of the scale
_AXES = ("batch", "length", None)  # each device normalizes its own rows


def fits(features: int) -> bool:
    """Return whether the kernels support arrays [..., features]."""
    return features % _MIN_CHUNK == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def branch(
    x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float, interpret: bool = False
) -> list[jax.Array]:  # fmt: skip
    """Return x and `ops.rms_norm(x, scale, dtype, epsilon)`. The backward kernel adds the gradients of both.

    Args:
      x: [batch, length, features]; see `fits`. Every device has all features of its rows.
      scale: float32 [features].
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    return _branch_forward(x, scale, dtype, epsilon, interpret)[0]


# Sharded here, not around `branch`: JAX would then sum the gradients of devices that share a row, which are equal.
def _branch_forward(x, scale, dtype, epsilon, interpret):
    compute = functools.partial(_forward, dtype=dtype, epsilon=epsilon, interpret=interpret)
    return [x, on_each_device(compute, [_AXES, (None,)], _AXES, x, scale)], (x, scale)


def _branch_backward(dtype, epsilon, interpret, residuals, gradients):
    compute = functools.partial(_backward, dtype=dtype, epsilon=epsilon, interpret=interpret)
    x_gradient, scale_gradients = on_each_device(
        compute, [_AXES, (None,), _AXES, _AXES], [_AXES, (*_AXES, None)], *residuals, *gradients
    )
    return x_gradient, jnp.sum(scale_gradients, axis=(0, 1, 2))


branch.defvjp(_branch_forward, _branch_backward)


@functools.partial(jax.jit, static_argnames=("dtype", "epsilon", "interpret"))
def _forward(x, scale, dtype, epsilon, interpret):
    flat = x.reshape(-1, x.shape[-1])
    rows, features = flat.shape
    block = _block(rows, features)
    chunks = _chunks(features)

    def norm_kernel(x_ref, scale_ref, out_ref):
        parts = [x_ref[:, chunk].astype(jnp.float32) for chunk in chunks]
        inverse = _inverse(parts, features, epsilon)
        for part, chunk in zip(parts, chunks, strict=True):
            out_ref[:, chunk] = (rounded(part * inverse, dtype) * rounded(scale_ref[chunk], dtype)).astype(dtype)

    tile = pl.BlockSpec((block, features), lambda i: (i, 0))
    normed = pl.pallas_call(
        norm_kernel, grid=(rows // block,), in_specs=(tile, pl.BlockSpec((features,), lambda i: (0,))), out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(flat.shape, dtype), interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
    )(flat, scale)  # fmt: skip
    return normed.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("dtype", "epsilon", "interpret"))
def _backward(x, scale, to_x, to_norm, dtype, epsilon, interpret):
    """Return the gradients of x, from those of both results, and of the scale, float32 [1, 1, 1, features]."""
    rows, features = math.prod(x.shape[:-1]), x.shape[-1]
    block = _block(rows, features)
    blocks = math.gcd(rows // block, max(1, _GRADIENT_ROWS // block))
    programs = rows // block // blocks
    chunks = _chunks(features)

    def norm_gradient_kernel(scale_ref, x_ref, to_x_ref, to_norm_ref, x_gradient_ref, scale_gradient_ref):
        def load(ref, rows):
            return [ref[rows, chunk].astype(jnp.float32) for chunk in chunks]

        def add(i, sums):
            block_rows = pl.ds(i * block, block)
            parts, gradients = load(x_ref, block_rows), load(to_norm_ref, block_rows)
            inverse = _inverse(parts, features, epsilon)
            normed = [part * inverse for part in parts]
            scaled = [
                gradient * rounded(scale_ref[chunk], dtype) for gradient, chunk in zip(gradients, chunks, strict=True)
            ]
            mean = sum(jnp.sum(a * b, axis=1, keepdims=True) for a, b in zip(normed, scaled, strict=True)) / features
            for a, b, to_x, chunk in zip(normed, scaled, load(to_x_ref, block_rows), chunks, strict=True):
                x_gradient_ref[block_rows, chunk] = (inverse * (b - a * mean) + to_x).astype(x.dtype)
            products = [a * rounded(b, dtype) for a, b in zip(gradients, normed, strict=True)]
            return tuple(a + b for a, b in zip(sums, products, strict=True))

        zeros = tuple(jnp.zeros((block, chunk.size), jnp.float32) for chunk in chunks)
        for chunk, total in zip(chunks, jax.lax.fori_loop(0, blocks, add, zeros), strict=True):
            scale_gradient_ref[chunk] = jnp.sum(total, axis=0)

    tile = pl.BlockSpec((blocks * block, features), lambda i: (i, 0))
    x_gradient, scale_gradients = pl.pallas_call(
        norm_gradient_kernel, grid=(programs,),
        in_specs=(pl.BlockSpec((features,), lambda i: (0,)), tile, tile, tile),
        out_specs=(tile, pl.BlockSpec((None, features), lambda i: (i, 0))),
        out_shape=(
            jax.ShapeDtypeStruct((rows, features), x.dtype), jax.ShapeDtypeStruct((programs, features), jnp.float32)
        ),
        interpret=interpret, compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
    )(scale, *(array.reshape(rows, features) for array in (x, to_x, to_norm)))  # fmt: skip
    return [x_gradient.reshape(x.shape), jnp.sum(scale_gradients, axis=0)[None, None, None]]


def _block(rows: int, features: int) -> int:
    """Return the number of rows of a block."""
    return math.gcd(rows, max(1, _VALUES // pl.next_power_of_2(features)))


def _chunks(features: int) -> list[pl.Slice]:
    """Return slices that cover the features, each of a power of two, as arrays in Triton are."""
    size = math.gcd(features, _MAX_CHUNK)
    return [pl.Slice(start, size) for start in range(0, features, size)]


def _inverse(parts: list[jax.Array], features: int, epsilon: float) -> jax.Array:
    """Return the inverse root mean square of each row."""
    return jax.lax.rsqrt(sum(jnp.sum(part * part, axis=1, keepdims=True) for part in parts) / features + epsilon)
