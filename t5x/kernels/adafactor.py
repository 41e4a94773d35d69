"""Pallas kernels for GPUs: Adafactor's step for one parameter.

XLA compiles it to about ten small kernels, which take a quarter of the compile time of a train step with unrolled
layers. Here a matrix takes four kernels and a vector one. Sums have a fixed order, so results are bitwise repeatable.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_BLOCK = (64, 128)
_MIN_BLOCK = 64  # rows and columns of a block
_CHUNK = 256  # of a vector
_MAX_VECTOR = 4096
# A program loads the sums of a row or column of blocks at once, and two sums of all blocks.
_MAX_BLOCKS_ALONG, _MAX_BLOCKS = 512, 8192


@dataclasses.dataclass(frozen=True)
class KernelSettings:
    """The settings of `Adafactor` that the kernels use."""

    epsilon1: float
    epsilon2: float
    clipping_threshold: float


def fits(param: jax.Array) -> bool:
    """Return whether the kernels support a parameter of this shape and dtype."""
    if param.dtype != jnp.float32:
        return False
    if param.ndim == 1:
        return param.size % _CHUNK == 0 and 0 < param.size <= _MAX_VECTOR
    if param.ndim != 2 or any(size % _MIN_BLOCK for size in param.shape):
        return False
    _, grid = _blocks_and_grid(param.shape)
    return max(grid) <= _MAX_BLOCKS_ALONG and 0 < math.prod(grid) <= _MAX_BLOCKS


@functools.partial(jax.jit, static_argnames=("settings", "interpret"))
def update_vector(
    param, grad, v, rates, *, settings: KernelSettings, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return the new parameter and second moment.

    Args:
      param, grad, v: float32 [size]; see `fits`.
      rates: float32 [2]: the decay of the second moment, and the learning rate.
      settings: static.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    chunks = [pl.ds(start, _CHUNK) for start in range(0, param.size, _CHUNK)]

    def vector_kernel(param_ref, grad_ref, v_ref, rates_ref, new_param_ref, new_v_ref):
        decay, rate = rates_ref[0], rates_ref[1]
        params, moments, steps = [], [], []
        for chunk in chunks:
            grad = grad_ref[chunk]
            params.append(param_ref[chunk])
            moments.append(decay * v_ref[chunk] + (1.0 - decay) * (grad * grad + settings.epsilon1))
            steps.append(grad * jax.lax.rsqrt(moments[-1]))
        square = lambda parts: sum(jnp.sum(part * part) for part in parts) / param.size
        scale = _scale(rate, square(params), square(steps), settings)
        for chunk, old, moment, step in zip(chunks, params, moments, steps, strict=True):
            new_param_ref[chunk] = old - step * scale
            new_v_ref[chunk] = moment

    like = jax.ShapeDtypeStruct(param.shape, param.dtype)
    return pl.pallas_call(
        vector_kernel, out_shape=(like, like), input_output_aliases={0: 0, 2: 1}, interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
    )(param, grad, v, rates)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("settings", "row_axis", "interpret"))
def update_matrix(
    param: jax.Array,
    grad: jax.Array,
    v_row: jax.Array,
    v_col: jax.Array,
    rates: jax.Array,
    *,
    row_axis: int,
    settings: KernelSettings,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the new parameter, `v_row` and `v_col`.

    Args:
      param, grad: float32 [rows, columns]; see `fits`.
      v_row: float32 [shape[row_axis]], the squared gradients averaged over the other axis.
      v_col: the same with the axes exchanged.
      rates: float32 [2]: the decay of the second moment, and the learning rate.
      settings: static.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.
    """
    shape = param.shape
    block, grid = _blocks_and_grid(shape)
    array = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    tile = pl.BlockSpec(block, lambda i, j: (i, j))
    along = pl.BlockSpec(block[:1], lambda i, j: (i,)), pl.BlockSpec(block[1:], lambda i, j: (j,))
    one = pl.BlockSpec((None,), lambda i, j: (i * grid[1] + j,))
    whole = lambda *sizes: pl.BlockSpec(sizes, lambda *_: (0,) * len(sizes))
    tiles = math.prod(grid)

    call = functools.partial(
        pl.pallas_call, interpret=interpret, compiler_params=triton.CompilerParams(num_warps=8, num_stages=1)
    )

    def sums_kernel(param_ref, grad_ref, rows_ref, columns_ref, params_ref):
        grad, param = grad_ref[...], param_ref[...]
        squared = grad * grad + settings.epsilon1
        rows_ref[...] = jnp.sum(squared, axis=1)
        columns_ref[...] = jnp.sum(squared, axis=0)
        params_ref[...] = jnp.sum(param * param)

    *sums, params = call(
        sums_kernel, grid=grid, in_specs=(tile, tile),
        out_specs=(
            pl.BlockSpec((None, block[0]), lambda i, j: (j, i)), pl.BlockSpec((None, block[1]), lambda i, j: (i, j)),
            one,
        ),
        out_shape=(array(grid[1], shape[0]), array(grid[0], shape[1]), array(tiles)),
    )(param, grad)  # fmt: skip

    def moments_kernel(rows_ref, columns_ref, v0_ref, v1_ref, rates_ref, new0_ref, new1_ref):
        decay, number = rates_ref[0], pl.program_id(0)

        def update(axis, sums_ref, v_ref, new_ref):
            @pl.when(number < grid[axis])
            def _():
                here = pl.ds(number * block[axis], block[axis])
                total = _total(grid[1 - axis], lambda numbers: sums_ref[numbers, here])
                new_ref[here] = decay * v_ref[here] + (1.0 - decay) * (total / shape[1 - axis])

        update(0, rows_ref, v0_ref, new0_ref)
        update(1, columns_ref, v1_ref, new1_ref)

    vectors = (v_row, v_col) if row_axis == 0 else (v_col, v_row)
    specs = tuple(whole(size) for size in shape)
    vectors = call(
        moments_kernel, grid=(max(grid),),
        in_specs=(whole(*sums[0].shape), whole(*sums[1].shape), *specs, whole(2)), out_specs=specs,
        out_shape=tuple(array(size) for size in shape), input_output_aliases={2: 0, 3: 1},
    )(*sums, *vectors, rates)  # fmt: skip
    row = vectors[row_axis]

    def step_of(grad, row_ref, v0_ref, v1_ref):
        chunk = math.gcd(row.size, _CHUNK)
        mean = sum(jnp.sum(row_ref[pl.ds(start, chunk)]) for start in range(0, row.size, chunk)) / row.size
        factors = [jax.lax.rsqrt(v / mean if i == row_axis else v) for i, v in enumerate((v0_ref[...], v1_ref[...]))]
        return grad * factors[0][:, None] * factors[1][None, :]

    def norm_kernel(grad_ref, row_ref, v0_ref, v1_ref, steps_ref):
        step = step_of(grad_ref[...], row_ref, v0_ref, v1_ref)
        steps_ref[...] = jnp.sum(step * step)

    steps = call(
        norm_kernel, grid=grid, in_specs=(tile, whole(row.size), *along), out_specs=one, out_shape=array(tiles)
    )(grad, row, *vectors)

    def step_kernel(param_ref, grad_ref, row_ref, v0_ref, v1_ref, params_ref, steps_ref, rates_ref, new_ref):
        step = step_of(grad_ref[...], row_ref, v0_ref, v1_ref)
        mean = lambda ref: _total(tiles, lambda numbers: ref[numbers]) / param.size
        new_ref[...] = param_ref[...] - step * _scale(rates_ref[1], mean(params_ref), mean(steps_ref), settings)

    new = call(
        step_kernel, grid=grid, in_specs=(tile, tile, whole(row.size), *along, whole(tiles), whole(tiles), whole(2)),
        out_specs=tile, out_shape=array(*shape), input_output_aliases={0: 0},
    )(param, grad, row, *vectors, params, steps, rates)  # fmt: skip
    return new, vectors[row_axis], vectors[1 - row_axis]


def _blocks_and_grid(shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shape of a block, and the number of blocks along both axes."""
    block = math.gcd(shape[0], _BLOCK[0]), math.gcd(shape[1], _BLOCK[1])
    return block, (shape[0] // block[0], shape[1] // block[1])


def _scale(rate: Any, param_square: Any, step_square: Any, settings: KernelSettings) -> Any:
    """Return the factor of a step, from the mean squares of the parameter and of the step."""
    # In Triton, jnp.maximum ignores NaN.
    at_least = lambda x, low: jnp.where(x < low, low, x)
    clipped = at_least(jnp.sqrt(step_square) / settings.clipping_threshold, 1.0)
    return rate * at_least(jnp.sqrt(param_square), settings.epsilon2) / clipped


def _total(count: int, load: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the sum of load(numbers), for numbers from 0 to `count`, over the first axis.

    Arrays in Triton have sizes that are powers of two, so numbers are clamped and the values of the rest are masked.
    """
    numbers = jnp.arange(pl.next_power_of_2(count))
    parts = load(jnp.minimum(numbers, count - 1))
    return jnp.sum(jnp.where((numbers < count).reshape(-1, *(1,) * (parts.ndim - 1)), parts, 0.0), axis=0)
