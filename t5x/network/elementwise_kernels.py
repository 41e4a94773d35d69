"""Pallas kernels for GPUs that read and write each value once, where XLA takes several passes over memory.

`gate` is the product of a gated MLP's activations, with a gradient that is written in one piece. `quantize` converts to
FP8 and also returns the transposed copy that FP8 matmuls need, and the largest absolute value. They are jitted so that
equal calls, one per layer, are traced and lowered once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_GATE_BLOCK = (4, 1024)
_QUANTIZE_BLOCK = (32, 128)
_LEAST = 16  # rows and columns of a block


def _gelu(x: jax.Array) -> jax.Array:
    """Return nn.gelu(x): 0.5 (1 + tanh y) is sigmoid(2 y), which needs fewer instructions.

    The limit keeps the gradient from becoming infinity times 0.
    """
    exponent = -2.3022082 * (x + 0.044715 * x * x * x)  # the factor is 2 sqrt(2 / pi) / ln 2
    return x / (1.0 + jnp.exp2(jnp.minimum(exponent, 100.0)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "linear": lambda x: x,
    "relu": lambda x: jnp.maximum(x, 0.0),
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "tanh": jnp.tanh,
}


def fits(rows: int, columns: int) -> bool:
    """Return whether the kernels take arrays of this shape."""
    return rows % _LEAST == 0 and columns % _LEAST == 0


def _block(shape: tuple[int, int], most: tuple[int, int]) -> tuple[int, int]:
    return math.gcd(shape[0], most[0]), math.gcd(shape[1], most[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gate(joined: jax.Array, activations: tuple[str, ...], interpret: bool = False) -> jax.Array:
    """Return act_0(joined[..., 0, :]) * act_1(joined[..., 1, :]) …, computed in float32.

    Args:
      joined: [..., activations, features]; see `fits`.
      activations: names.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    return _gate_forward(joined, activations, interpret)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gate_forward(joined, activations, interpret):
    flat = joined.reshape(-1, *joined.shape[-2:])
    rows, count, columns = flat.shape

    def gate_kernel(*refs):
        *parts, out = refs
        out[...] = _product(activations, [part[...].astype(jnp.float32) for part in parts]).astype(out.dtype)

    out = _call_gate(
        gate_kernel, (rows, columns), _specs(flat), (flat,) * count,
        lambda block: pl.BlockSpec(block, lambda i, j: (i, j)), (rows, columns), joined.dtype, interpret,
    )  # fmt: skip
    return out.reshape(*joined.shape[:-2], columns), joined


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gate_backward(activations, interpret, joined, gradient):
    flat = joined.reshape(-1, *joined.shape[-2:])
    rows, count, columns = flat.shape

    def gate_gradient_kernel(*refs):
        *parts, gradient, out = refs
        values = [part[...].astype(jnp.float32) for part in parts]
        _, backward = jax.vjp(lambda *values: _product(activations, values), *values)
        for i, made in enumerate(backward(gradient[...].astype(jnp.float32))):
            out[:, i, :] = made.astype(out.dtype)

    specs = lambda block: [*_specs(flat)(block), pl.BlockSpec(block, lambda i, j: (i, j))]
    out = _call_gate(
        gate_gradient_kernel, (rows, columns), specs, (*(flat,) * count, gradient.reshape(rows, columns)),
        lambda block: pl.BlockSpec((block[0], count, block[1]), lambda i, j: (i, 0, j)), flat.shape, joined.dtype,
        interpret,
    )  # fmt: skip
    return (out.reshape(joined.shape),)


gate.defvjp(_gate_forward, _gate_backward)


def _product(activations: tuple[str, ...], values: Any) -> jax.Array:
    parts = (ACTIVATIONS[name](value) for name, value in zip(activations, values, strict=True))
    return functools.reduce(jnp.multiply, parts)


def _specs(flat: jax.Array) -> Callable[[tuple[int, int]], list[pl.BlockSpec]]:
    """Return the specs of the parts of `flat` [rows, parts, columns] for a block."""
    return lambda block: [
        pl.BlockSpec((block[0], None, block[1]), lambda i, j, part=part: (i, part, j)) for part in range(flat.shape[1])
    ]


def _call_gate(kernel, shape, in_specs, arrays, out_spec, out_shape, dtype, interpret):
    block = _block(shape, _GATE_BLOCK)
    return pl.pallas_call(
        kernel, grid=(shape[0] // block[0], shape[1] // block[1]), in_specs=in_specs(block), out_specs=out_spec(block),
        out_shape=jax.ShapeDtypeStruct(out_shape, dtype), interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
    )(*arrays)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def quantize(
    x: jax.Array, scale: jax.Array, dtype: Any, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return scale * x as FP8, saturated, infinity as NaN; the same transposed; and the largest absolute value of x.

    Args:
      x: [rows, columns]; see `fits`.
      scale: float32 scalar.
      dtype: an FP8 dtype.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    top = float(jnp.finfo(dtype).max)
    block = _block(x.shape, _QUANTIZE_BLOCK)
    grid = x.shape[0] // block[0], x.shape[1] // block[1]

    def quantize_kernel(x_ref, scale_ref, out_ref, transposed_ref, amax_ref):
        x = x_ref[...].astype(jnp.float32)
        size = jnp.abs(x)
        scaled = jnp.clip(x * scale_ref[0], -top, top)
        made = jnp.where(size < jnp.inf, scaled, jnp.nan).astype(dtype)
        out_ref[...] = made
        transposed_ref[...] = made.T
        amax_ref[0, 0] = jnp.max(size)

    made, transposed, amax = pl.pallas_call(
        quantize_kernel, grid=grid,
        in_specs=(pl.BlockSpec(block, lambda i, j: (i, j)), pl.BlockSpec((1,), lambda i, j: (0,))),
        out_specs=(
            pl.BlockSpec(block, lambda i, j: (i, j)), pl.BlockSpec(block[::-1], lambda i, j: (j, i)),
            pl.BlockSpec((1, 1), lambda i, j: (i, j)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(x.shape[::-1], dtype),
            jax.ShapeDtypeStruct(grid, jnp.float32),
        ),
        interpret=interpret, compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
    )(x, scale.reshape(1).astype(jnp.float32))  # fmt: skip
    return made, transposed, jnp.max(amax)
