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

_MAX_CHUNK, _MIN_CHUNK = 1024, 128  # features that are loaded at once
_FORWARD_VALUES, _FORWARD_WARPS = 4096, 4  # a block has this many values at most
_BACKWARD_VALUES, _BACKWARD_WARPS = 4096, 4
_BACKWARD_BLOCKS = 4  # that one program sums for the gradient of the scale


def fits(features: int) -> bool:
    """Return whether the kernels support arrays [..., features]."""
    return features % _MIN_CHUNK == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def rms_norm(x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float, interpret: bool = False) -> jax.Array:
    """Return `layers.rms_norm(x, scale, dtype, epsilon)`.

    Args:
      x: [..., features]; see `fits`.
      scale: float32 [features].
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    return _forward(x, scale, dtype, epsilon, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def branch(
    x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float, interpret: bool = False
) -> list[jax.Array]:
    """Return x and its norm. The kernel of the gradient adds those of both."""
    return [x, _forward(x, scale, dtype, epsilon, interpret)]


def _norm_forward(x, scale, dtype, epsilon, interpret):
    return _forward(x, scale, dtype, epsilon, interpret), (x, scale)


def _norm_backward(dtype, epsilon, interpret, residuals, gradient):
    return _backward(*residuals, gradient, None, dtype, epsilon, interpret)


def _branch_forward(x, scale, dtype, epsilon, interpret):
    return [x, _forward(x, scale, dtype, epsilon, interpret)], (x, scale)


def _branch_backward(dtype, epsilon, interpret, residuals, gradients):
    to_x, to_norm = gradients
    return _backward(*residuals, to_norm, to_x, dtype, epsilon, interpret)


rms_norm.defvjp(_norm_forward, _norm_backward)
branch.defvjp(_branch_forward, _branch_backward)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _forward(x, scale, dtype, epsilon, interpret):
    flat = x.reshape(-1, x.shape[-1])
    rows, features = flat.shape
    block = math.gcd(rows, _rows(features, _FORWARD_VALUES))
    chunks = _chunks(features)

    def norm_kernel(x_ref, scale_ref, out_ref):
        parts = [x_ref[:, chunk].astype(jnp.float32) for chunk in chunks]
        inverse = _inverse(parts, features, epsilon)
        for part, chunk in zip(parts, chunks, strict=True):
            out_ref[:, chunk] = (_rounded(part * inverse, dtype) * _rounded(scale_ref[chunk], dtype)).astype(dtype)

    tile = pl.BlockSpec((block, features), lambda i: (i, 0))
    made = pl.pallas_call(
        norm_kernel, grid=(rows // block,), in_specs=(tile, pl.BlockSpec((features,), lambda i: (0,))), out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(flat.shape, dtype), interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=_FORWARD_WARPS, num_stages=1),
    )(flat, scale)  # fmt: skip
    return made.reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _backward(x, scale, to_norm, to_x, dtype, epsilon, interpret):
    """Return the gradients of x and of the scale.

    Args:
      to_norm: gradient of the norm.
      to_x: added to the gradient of x, unless None.
    """
    rows, features = math.prod(x.shape[:-1]), x.shape[-1]
    block = math.gcd(rows, _rows(features, _BACKWARD_VALUES))
    blocks = math.gcd(rows // block, _BACKWARD_BLOCKS)
    programs = rows // block // blocks
    chunks = _chunks(features)

    def norm_gradient_kernel(scale_ref, x_ref, to_norm_ref, *refs):
        *to_x_ref, x_gradient_ref, scale_gradient_ref = refs
        load = lambda ref, at: [ref[at, chunk].astype(jnp.float32) for chunk in chunks]

        def add(i, sums):
            at = pl.ds(i * block, block)
            parts, gradients = load(x_ref, at), load(to_norm_ref, at)
            inverse = _inverse(parts, features, epsilon)
            normed = [part * inverse for part in parts]
            scaled = [
                gradient * _rounded(scale_ref[chunk], dtype) for gradient, chunk in zip(gradients, chunks, strict=True)
            ]
            mean = sum(jnp.sum(a * b, axis=1, keepdims=True) for a, b in zip(normed, scaled, strict=True)) / features
            made = [inverse * (b - a * mean) for a, b in zip(normed, scaled, strict=True)]
            for ref in to_x_ref:
                made = [a + b for a, b in zip(made, load(ref, at), strict=True)]
            for part, chunk in zip(made, chunks, strict=True):
                x_gradient_ref[at, chunk] = part.astype(x.dtype)
            products = [a * _rounded(b, dtype) for a, b in zip(gradients, normed, strict=True)]
            return tuple(a + b for a, b in zip(sums, products, strict=True))

        zeros = tuple(jnp.zeros((block, chunk.size), jnp.float32) for chunk in chunks)
        for chunk, total in zip(chunks, jax.lax.fori_loop(0, blocks, add, zeros), strict=True):
            scale_gradient_ref[chunk] = jnp.sum(total, axis=0)

    tile = pl.BlockSpec((blocks * block, features), lambda i: (i, 0))
    arrays = [array.reshape(rows, features) for array in (x, to_norm, to_x) if array is not None]
    x_gradient, scale_gradients = pl.pallas_call(
        norm_gradient_kernel, grid=(programs,),
        in_specs=[pl.BlockSpec((features,), lambda i: (0,)), *[tile] * len(arrays)],
        out_specs=(tile, pl.BlockSpec((None, features), lambda i: (i, 0))),
        out_shape=(
            jax.ShapeDtypeStruct((rows, features), x.dtype), jax.ShapeDtypeStruct((programs, features), jnp.float32)
        ),
        interpret=interpret, compiler_params=triton.CompilerParams(num_warps=_BACKWARD_WARPS, num_stages=1),
    )(scale, *arrays)  # fmt: skip
    return x_gradient.reshape(x.shape), jnp.sum(scale_gradients, axis=0)


def _rows(features: int, values: int) -> int:
    """Return how many rows of a block have at most this many values, a power of two."""
    return max(1, values // pl.next_power_of_2(features))


def _chunks(features: int) -> list[pl.Slice]:
    """Divide the features: the size of an array in Triton is a power of two."""
    size = math.gcd(features, _MAX_CHUNK)
    return [pl.ds(start, size) for start in range(0, features, size)]


def _inverse(parts: list[jax.Array], features: int, epsilon: float) -> jax.Array:
    """Return the inverse root mean square of each row."""
    return jax.lax.rsqrt(sum(jnp.sum(part * part, axis=1, keepdims=True) for part in parts) / features + epsilon)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype).astype(jnp.float32)
