"""Pallas kernels for GPUs that read and write each value once, where XLA takes several passes over memory.

`gate` is the product of a gated MLP's activations, with dropout; its gradient is written in one piece. `quantize`
converts to FP8 and also returns the transposed copy that FP8 matmuls need, and the largest absolute value. They are
jitted so that equal calls, one per layer, are traced and lowered once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_GATE_BLOCK = (4, 1024)
_GATE_GRADIENT_BLOCK = (1, 2048)
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
    exponent = -2.3022082 * (x + 0.044715 * x * x * x)  # -2 y / ln 2; y is sqrt(2 / pi) (x + 0.044715 x**3)
    # Without the limit, the result of large negative x is infinity times 0.
    return 1.0 / (1.0 + jnp.exp2(jnp.minimum(exponent, 100.0)))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gate(
    joined: jax.Array, factors: jax.Array | None, activations: tuple[str, ...], interpret: bool = False
) -> jax.Array:
    """Return act_0(joined[..., 0, :]) * act_1(joined[..., 1, :]) … * factors, computed in float32.

    Args:
      joined: [batch, length, activations, features]; see `fits`.
      factors: float32 [batch, features], of dropout, for all positions of an example; 0 gives 0 in any case. None is 1.
      activations: names.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    return _gate_forward(joined, factors, activations, interpret)[0]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gate_forward(joined, factors, activations, interpret):
    def gate_kernel(*refs):
        *refs, out = refs
        parts, factor = refs[: len(activations)], refs[len(activations) :]
        made = _product(activations, [part[...].astype(jnp.float32) for part in parts])
        out[...] = _times(made, factor).astype(out.dtype)

    batch, length, _, columns = joined.shape
    out = _call_gate(
        gate_kernel, joined, factors, (), lambda block: pl.BlockSpec(block, lambda i, j: (i, j)),
        (batch * length, columns), _GATE_BLOCK, interpret,
    )  # fmt: skip
    return out.reshape(batch, length, columns), (joined, factors)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gate_backward(activations, interpret, residuals, gradient):
    joined, factors = residuals
    count = len(activations)

    def gate_gradient_kernel(*refs):
        *refs, gradient, out = refs
        values = [part[...].astype(jnp.float32) for part in refs[:count]]
        _, backward = jax.vjp(lambda *values: _product(activations, values), *values)
        for i, made in enumerate(backward(_times(gradient[...].astype(jnp.float32), refs[count:]))):
            out[:, i, :] = made.astype(out.dtype)

    rows, columns = math.prod(joined.shape[:2]), joined.shape[-1]
    out = _call_gate(
        gate_gradient_kernel, joined, factors, (gradient.reshape(rows, columns),),
        lambda block: pl.BlockSpec((block[0], count, block[1]), lambda i, j: (i, 0, j)), (rows, count, columns),
        _GATE_GRADIENT_BLOCK, interpret,
    )  # fmt: skip
    return out.reshape(joined.shape), None


gate.defvjp(_gate_forward, _gate_backward)


def _times(x: jax.Array, factor: Sequence[Any]) -> jax.Array:
    """Return x times the factor, of which there may be none."""
    for ref in factor:
        x = jnp.where(ref[...] > 0, x * ref[...], 0.0)
    return x


def _product(activations: tuple[str, ...], values: Any) -> jax.Array:
    parts = (ACTIVATIONS[name](value) for name, value in zip(activations, values, strict=True))
    return functools.reduce(jnp.multiply, parts)


def _call_gate(kernel, joined, factors, others, out_spec, out_shape, most, interpret):
    """Call a kernel with blocks of the parts of `joined`, of the factors unless None, and of other flat arrays."""
    batch, length, count, columns = joined.shape
    block = _block((length, columns), most)  # within one example
    part_spec = lambda part: pl.BlockSpec((block[0], None, block[1]), lambda i, j: (i, part, j))
    specs, arrays = [part_spec(part) for part in range(count)], [joined.reshape(-1, count, columns)] * count
    if factors is not None:
        specs.append(pl.BlockSpec((None, block[1]), lambda i, j: (i * block[0] // length, j)))
        arrays.append(factors)
    specs += [pl.BlockSpec(block, lambda i, j: (i, j)) for _ in others]
    return pl.pallas_call(
        kernel, grid=(batch * length // block[0], columns // block[1]), in_specs=specs, out_specs=out_spec(block),
        out_shape=jax.ShapeDtypeStruct(out_shape, joined.dtype), interpret=interpret,
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
