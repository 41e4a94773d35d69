"""Pallas kernels for GPUs that read and write each value once, where XLA takes several passes over memory.

`gate` is the product of a gated MLP's activations, with dropout; its gradient is written in one piece. `quantize`
converts to FP8 and also returns the transposed copy that FP8 matmuls need, and the largest absolute value. They are
jitted so that equal calls, one per layer, are traced and lowered once.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x.kernels.ops import ACTIVATIONS, multiply_gates

_GATE_VALUES, _GATE_COLUMNS = 4096, 1024  # of a block, at most
_GATE_GRADIENT_VALUES, _GATE_GRADIENT_COLUMNS = 2048, 2048
_QUANTIZE_BLOCK = (32, 128)
_LEAST = 16  # rows and columns of a block


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    """Return nn.gelu(x): 0.5 (1 + tanh y) is sigmoid(2 y), which needs fewer instructions."""
    return x * _gelu_sigmoid(x)


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    sigmoid = _gelu_sigmoid(x)
    slope = 1.5957691 * (1.0 + 0.134145 * x * x)  # of 2 y
    return x * sigmoid, (sigmoid + x * sigmoid * (1.0 - sigmoid) * slope) * tangent


def _gelu_sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp2(-2.3022082 * (x + 0.044715 * x * x * x)))  # y is sqrt(2 / pi) (x + 0.044715 x**3)


_ACTIVATIONS = ACTIVATIONS | {"gelu": _gelu, "relu": lambda x: jnp.maximum(x, 0.0)}


def fits(rows: int, columns: int) -> bool:
    """Return whether the kernels take arrays of this shape."""
    return rows % _LEAST == 0 and columns % _LEAST == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gate(
    parts: jax.Array, factors: jax.Array | None, activations: tuple[str, ...], interpret: bool = False
) -> jax.Array:
    """Return act_0(parts[..., 0, :]) * act_1(parts[..., 1, :]) … * factors, computed in float32.

    Args:
      parts: [batch, length, activations, features]; see `fits`.
      factors: of dropout, float32 [batch, 1, features]; None without dropout. Where 0, the result is 0, even for NaN.
      activations: names.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    return _gate_forward(parts, factors, activations, interpret)[0]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gate_forward(parts, factors, activations, interpret):
    def gate_kernel(part_refs, factor_ref, out_ref):
        product = _product(activations, [ref[...].astype(jnp.float32) for ref in part_refs])
        out_ref[...] = _drop(product, factor_ref).astype(out_ref.dtype)

    batch, length, _, columns = parts.shape
    block = _gate_block(length, columns, _GATE_VALUES, _GATE_COLUMNS)
    out = _call_gate(
        gate_kernel, parts, factors, (), pl.BlockSpec(block, lambda i, j: (i, j)), (batch * length, columns), block,
        interpret,
    )  # fmt: skip
    return out.reshape(batch, length, columns), (parts, factors)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gate_backward(activations, interpret, residuals, gradient):
    parts, factors = residuals

    def gate_gradient_kernel(part_refs, factor_ref, gradient_ref, out_ref):
        values = [ref[...].astype(jnp.float32) for ref in part_refs]
        _, backward = jax.vjp(lambda *values: _product(activations, values), *values)
        for i, part_gradient in enumerate(backward(_drop(gradient_ref[...].astype(jnp.float32), factor_ref))):
            out_ref[:, i, :] = part_gradient.astype(out_ref.dtype)

    batch, length, count, columns = parts.shape
    block = _gate_block(length, columns, _GATE_GRADIENT_VALUES, _GATE_GRADIENT_COLUMNS)
    out = _call_gate(
        gate_gradient_kernel, parts, factors, (gradient.reshape(-1, columns),),
        pl.BlockSpec((block[0], count, block[1]), lambda i, j: (i, 0, j)), (batch * length, count, columns), block,
        interpret,
    )  # fmt: skip
    return out.reshape(parts.shape), None


gate.defvjp(_gate_forward, _gate_backward)


def _gate_block(length: int, columns: int, values: int, widest: int) -> tuple[int, int]:
    """Return the rows of one example and the columns of a block with at most `values` values."""
    width = math.gcd(columns, widest)
    return math.gcd(length, values // width), width


def _drop(x: jax.Array, factor_ref: Any) -> jax.Array:
    return x if factor_ref is None else jnp.where(factor_ref[...] > 0, x * factor_ref[...], 0.0)


def _product(activations: tuple[str, ...], values: Any) -> jax.Array:
    return multiply_gates([_ACTIVATIONS[name] for name in activations], values)


def _call_gate(kernel, parts, factors, others, out_spec, out_shape, block, interpret):
    """Call kernel(references to the parts, to the factors or None, to other flat arrays and to the output)."""
    batch, length, count, columns = parts.shape
    part_spec = lambda part: pl.BlockSpec((block[0], None, block[1]), lambda i, j: (i, part, j))
    specs, arrays = [part_spec(part) for part in range(count)], [parts.reshape(-1, count, columns)] * count
    if factors is not None:
        specs.append(pl.BlockSpec((None, None, block[1]), lambda i, j: (i * block[0] // length, 0, j)))
        arrays.append(factors)

    def with_factor(*refs):
        part_refs, refs = refs[:count], refs[count:]
        return kernel(part_refs, *((None, *refs) if factors is None else refs))

    specs += [pl.BlockSpec(block, lambda i, j: (i, j)) for _ in others]
    return pl.pallas_call(
        with_factor, grid=(batch * length // block[0], columns // block[1]), in_specs=specs, out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct(out_shape, parts.dtype), name=kernel.__name__, interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
    )(*arrays, *others)  # fmt: skip


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
    block = tuple(map(math.gcd, x.shape, _QUANTIZE_BLOCK))
    grid = x.shape[0] // block[0], x.shape[1] // block[1]

    def quantize_kernel(x_ref, scale_ref, out_ref, transposed_ref, amax_ref):
        x = x_ref[...].astype(jnp.float32)
        size = jnp.abs(x)
        scaled = jnp.clip(x * scale_ref[0], -top, top)
        quantized = jnp.where(size < jnp.inf, scaled, jnp.nan).astype(dtype)
        out_ref[...] = quantized
        transposed_ref[...] = quantized.T
        amax_ref[0, 0] = jnp.max(size)

    quantized, transposed, amax = pl.pallas_call(
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
    return quantized, transposed, jnp.max(amax)
