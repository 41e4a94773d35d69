"""Fused attention for GPUs and TPUs: T5's bias table and its gradient, packed rows, any length, no [q, k] array.

Every sum has a fixed order, so results are bitwise reproducible. Blocks of queries and keys that do not see each other
are skipped: packed rows cost less than full ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from t5x.kernels import flash_kernels as kernels
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.flash_kernels import Block, Grid
from t5x.kernels.flash_preparation import (
    BlockPlan,
    Blocks,
    PreparedBias,
    PreparedMask,
    choose_blocks,
    make_plan,
    prepare_bias,
    prepare_mask,
)

_BIAS_PROGRAMS = 1024  # programs of the bias gradient's kernel, enough to fill a GPU
_TPU_FEW_BYTES = 1 << 20  # rows up to this size have two buffers: one is loaded while the other is in use
_TPU_TILES = 3  # of T5's bias


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    bias: RelativeBias | None = None,
    *,
    softcap: float | None = None,
    blocks: Blocks | None = None,
    target: str = "triton",
    interpret: Any = False,
) -> jax.Array:
    """Compute softmax(q·k + bias, where the mask allows) v, differentiable in query, key, value and the bias table.

    Args:
      query: [batch, q, heads, head_dim], bfloat16 or float16.
      key, value: [batch, k, key heads, head_dim]; the number of key heads divides that of the heads.
      mask, bias: prepared for this attention (`Ops.prepare_attention`), or prepared here. A bias of None adds nothing.
      softcap: logits become `softcap * tanh(logits / softcap)` before the bias is added.
      blocks: the block of each kernel; None chooses them by the shapes.
      target: see `make_plan`.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests; for TPUs also its parameters.

    Returns:
      [batch, q, heads, head_dim] in the dtype of `value`; 0 for a query that sees no key.
    """
    lengths, head_dim = (query.shape[1], key.shape[1]), query.shape[3]
    plan = make_plan(lengths, head_dim, mask, bias, softcap=softcap, blocks=blocks, target=target, interpret=interpret)
    prepared_mask = mask.prepared
    if prepared_mask is None or not prepared_mask.fits(plan, query.shape[0]):
        prepared_mask = prepare_mask(mask, query.shape[0], lengths, plan)
    prepared_bias = gradient_of = None
    if bias is not None:
        prepared_bias = bias.prepared
        if prepared_bias is None or prepared_bias.plan != plan:
            prepared_bias = prepare_bias(bias, plan)
        gradient_of = prepared_bias.near, prepared_bias.far
        prepared_bias = prepared_bias.replace(near=None, far=None)
    q_pad, k_pad = (padded - length for padded, length in zip(plan.lengths, lengths, strict=True))
    width_pad = pl.next_power_of_2(max(head_dim, 16)) - head_dim

    def pad(x: jax.Array, more: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, width_pad))) if more or width_pad else x

    out = _attention(
        pad(query, q_pad), pad(key, k_pad), pad(value, k_pad).astype(query.dtype), gradient_of, prepared_bias,
        prepared_mask, plan,
    )  # fmt: skip
    return out[:, : lengths[0], :, :head_dim].astype(value.dtype)


def tpu_memory(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> int:
    """Return the bytes of vector memory that the kernels for TPUs need for these shapes, with T5's bias."""
    block = choose_blocks(query_shape[1], key_shape[1], query_shape[3], for_tpu=True).query
    padded = lambda length, size: length + -length % size
    q, k, groups = padded(query_shape[1], block.q), padded(key_shape[1], block.k), query_shape[2] // key_shape[2]
    return max(_tpu_bytes(block, _TPU_TILES, 2, _tpu_row_bytes(k, 1)),
               _tpu_bytes(block, _TPU_TILES, groups, _tpu_row_bytes(q, groups)))  # fmt: skip


def _tpu_row_bytes(length: int, groups: int) -> int:
    """Return the bytes of the whole rows that a kernel holds: keys and values, or queries, gradients and vectors."""
    return length * groups * (2 * 2 * kernels.LANES + 2 * 4)


def _tpu_bytes(block: Block, tiles: int, heads: int, row_bytes: int) -> int:
    """Return the bytes of a kernel: whole rows, two buffers of the tiles of `heads` (or their gradients), and 4 MB."""
    return (4 << 20) + 2 * 4 * heads * tiles * block.q * block.k + row_bytes * (1 + (row_bytes <= _TPU_FEW_BYTES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(query, key, value, gradient_of, bias, mask, plan):
    """Compute attention for padded arrays. The bias's gradient is that of `gradient_of`, its `near` and `far`."""
    return _attention_forward(query, key, value, gradient_of, bias, mask, plan)[0]


def _attention_forward(query, key, value, gradient_of, bias, mask, plan):
    del gradient_of
    if plan.target != "tpu":
        out, lse = _forward(query, key, value, bias, mask, plan)
        return out, (query, key, value, bias, mask, out, lse)
    out, lse = _forward(*map(_swap_heads, (query, key, value)), bias, mask, plan)
    out = _swap_heads(out)
    # A TPU pads the last axis to 128 lanes, so heads that lie side by side take less memory until the backward pass.
    query, key, value, flat_out = (x.reshape(*x.shape[:2], -1) for x in (query, key, value, out))
    return out, (query, key, value, bias, mask, flat_out, lse)


def _attention_backward(plan, residuals, gradient):
    if plan.target != "tpu":
        return (*_backward(*residuals, gradient, plan), None, None)
    query, key, value, bias, mask, out, lse = residuals
    query, key, value, out = (
        _swap_heads(x.reshape(*x.shape[:2], -1, gradient.shape[3])) for x in (query, key, value, out)
    )
    *gradients, d_bias = _backward(query, key, value, bias, mask, out, lse, _swap_heads(gradient), plan)
    return (*map(_swap_heads, gradients), d_bias, None, None)


def _swap_heads(x: jax.Array) -> jax.Array:
    """Return [batch, length, heads, width] as [batch, heads, length, width], as kernels for TPUs take it, or back."""
    return x.swapaxes(1, 2)


_attention.defvjp(_attention_forward, _attention_backward)


# Jitted separately so that layers with the same shapes share their kernels, which take seconds to compile.


@functools.partial(jax.jit, static_argnames="plan")
def _forward(
    query, key, value, bias: PreparedBias | None, mask: PreparedMask, plan: BlockPlan
) -> tuple[jax.Array, jax.Array]:
    """Return the result and the base-2 log-sum-exp of the logits, float32 [batch, heads, q] or [batch, heads, 1, q]."""
    call = _call(query, key, value, bias, mask, plan, "forward")
    if plan.target == "hopper":
        from t5x.kernels import flash_hopper as hopper

        strip, _, q_codes, k_codes, ranges = call.shared()
        return hopper.forward(query, key, value, strip, q_codes, k_codes, ranges, plan.rules)
    out_shape = _like(query), _float32(*call.vector_shape)
    return call(kernels.forward_kernel, (), (), (call.q_block(), call.q_vector()), out_shape)


@functools.partial(jax.jit, static_argnames="plan")
def _backward(query, key, value, bias: PreparedBias | None, mask: PreparedMask, out, lse, gradient, plan: BlockPlan):
    """Return the gradients of query, key and value, and those of `near` and `far`."""
    arrays = query, key, value, bias, mask
    d_query, delta, d_far, d_tiles = _query_gradient(*arrays, out, lse, gradient, plan)
    d_key, d_value = _key_gradient(*arrays, lse, delta, gradient, plan)
    if bias is None:
        return d_query, d_key, d_value, None
    if d_tiles is None:
        d_tiles = _tiles_gradient(*arrays, lse, delta, gradient, plan)
    return d_query, d_key, d_value, (_sum_diagonals(d_tiles), d_far.sum((0, 3)))


def _query_gradient(query, key, value, bias, mask, out, lse, gradient, plan: BlockPlan):
    """Return the gradient of query, delta, that of far logits [batch, heads, 2, q], and on TPUs that of the tiles."""
    call = _call(query, key, value, bias, mask, plan, "query")
    block = call.block
    far = far_shape = tiles = tiles_shape = None
    if bias is not None:
        far = call.spec((None, None, 2, block.q), lambda i, b, h: (b, h, 0, i))
        far_shape = _float32(call.batch, call.heads, 2, call.q_length)
        if plan.target == "tpu":
            shape = plan.rules.tiles(block).count, block.q, block.k
            tiles = call.spec((None, *shape), lambda i, b, h: (h, 0, 0, 0))
            tiles_shape = _float32(call.heads, *shape)
    return call(
        functools.partial(kernels.query_gradient_kernel, bias_block=plan.blocks.bias),
        (call.q_block(), call.q_vector(), call.q_block()),
        (out, lse, gradient),
        (call.q_block(), call.q_vector(), far, tiles),
        (_like(query), _float32(*call.vector_shape), far_shape, tiles_shape),
    )


def _key_gradient(query, key, value, bias, mask, lse, delta, gradient, plan: BlockPlan):
    """Return the gradients of key and value."""
    call = _call(query, key, value, bias, mask, plan, "key")
    return call(
        functools.partial(kernels.key_gradient_kernel, groups=call.groups),
        (call.q_vectors(), call.q_vectors(), call.q_row()),
        (lse, delta, gradient),
        (call.k_block(), call.k_block()),
        (_like(key), _like(value)),
    )


def _tiles_gradient(query, key, value, bias, mask, lse, delta, gradient, plan: BlockPlan) -> jax.Array:
    """Return the gradient of the tiles [heads, tiles, q, k] of the bias block, on GPUs."""
    batch, q_length, heads, width = query.shape
    call = _call(query, key, value, bias, mask, plan, "bias")
    block, tiles, tile_bias = call.block, plan.rules.tiles(call.block), bias.tiles.bias
    visits, ends, q_codes, k_codes = mask.visits, mask.ends, mask.q_codes, mask.k_codes
    parts = max(1, min(visits.shape[1], _BIAS_PROGRAMS // (heads * tiles.count)))
    whole = lambda array: None if array is None else pl.BlockSpec(array.shape, lambda t, h, p: (0,) * array.ndim)
    rows = lambda array, group: pl.BlockSpec(
        (batch, array.shape[1], None, width), lambda t, h, p: (0, 0, jax.lax.div(h, group), 0)
    )
    vector = pl.BlockSpec((batch, None, q_length), lambda t, h, p: (0, h, 0))
    sums = pl.pallas_call(
        functools.partial(
            kernels.bias_gradient_kernel, rules=plan.rules, block=block, grid=call.grid, blocks=q_length // block.q
        ),
        grid=(tiles.count, heads, parts),
        in_specs=(
            rows(query, 1), rows(key, call.groups), rows(value, call.groups),
            pl.BlockSpec((None, *tile_bias.shape[1:]), lambda t, h, p: (h, 0, 0, 0)),
            whole(q_codes), whole(k_codes), whole(visits),
            pl.BlockSpec((None, *ends.shape[1:]), lambda t, h, p: (0, 0, 0)), vector, vector, rows(gradient, 1),
        ),
        out_specs=pl.BlockSpec((None, None, None, block.q, block.k), lambda t, h, p: (p, h, t, 0, 0)),
        out_shape=_float32(parts, heads, tiles.count, block.q, block.k),
        interpret=plan.interpret,
        compiler_params=call.compiler_params,
    )(query, key, value, tile_bias, q_codes, k_codes, visits, ends, lse, delta, gradient)  # fmt: skip
    return sums.sum(0)


def _sum_diagonals(x: jax.Array) -> jax.Array:
    """Sum each diagonal, [..., q, k] -> [..., q + k - 1], ordered by j - i."""
    *batch, q, k = x.shape
    flat = jnp.pad(x, (*[(0, 0)] * len(batch), (0, 0), (0, q - 1))).reshape(*batch, -1)
    # Reshaped to rows that are longer by one, each row is shifted by one relative to the previous row.
    skewed = jnp.pad(flat, (*[(0, 0)] * len(batch), (0, q))).reshape(*batch, q, q + k)
    return jnp.roll(skewed.sum(-2), q - 1, axis=-1)[..., :-1]


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(
    query, key, value, bias: PreparedBias | None, mask: PreparedMask, plan: BlockPlan, kernel: str
) -> "_KernelCall":
    return (_TpuCall if plan.target == "tpu" else _KernelCall)((query, key, value), bias, mask, plan, kernel)


class _KernelCall:
    """The block specs and arguments shared by the kernels with a grid of blocks, rows of the batch and heads.

    Queries, keys and values are [batch, length, heads, width]; log-sum-exps and delta are `vector_shape`.

    Attributes:
      scalars: options of the specs of arrays that are read number by number.
      rows: options of the specs of whole rows.
    """

    grid = Grid(block=0, batch=1, on_tpu=False)

    def __init__(self, arrays: tuple, bias: PreparedBias | None, mask: PreparedMask, plan: BlockPlan, kernel: str):
        self.arrays, self.plan, self.bias, self.mask, self.kernel = arrays, plan, bias, mask, kernel
        self.scalars: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self.block: Block = getattr(plan.blocks, kernel)
        self.of_keys = kernel == "key"
        self.ranges = getattr(mask.ranges, kernel)
        query, key, _ = arrays
        self.batch, self.width = query.shape[0], query.shape[3]
        (self.q_length, heads), (self.k_length, self.k_heads) = (self.placed(*x.shape[1:3]) for x in (query, key))
        self.groups = heads // self.k_heads
        self.heads = self.k_heads if self.of_keys else heads
        self.vector_shape: tuple[int, ...] = (self.batch, heads, self.q_length)

    @property
    def compiler_params(self) -> Any:
        from jax.experimental.pallas import triton

        return triton.CompilerParams(num_warps=self.block.warps, num_stages=self.block.stages)

    def __call__(self, kernel, more_specs: tuple, more_arrays: tuple, out_specs: tuple, out_shape: tuple) -> Any:
        """Call a kernel with query, key, value, what is `shared`, and more arrays."""
        if self.of_keys:
            blocks, specs = self.k_length // self.block.k, (self.q_row(), self.k_block(), self.k_block())
        else:
            blocks, specs = self.q_length // self.block.q, (self.q_block(), self.k_row(), self.k_row())
        return pl.pallas_call(
            functools.partial(kernel, rules=self.plan.rules, block=self.block, grid=self.grid),
            grid=self.ordered(blocks, self.batch, self.heads), in_specs=(*specs, *self.shared_specs(), *more_specs),
            out_specs=out_specs, out_shape=out_shape, interpret=self.plan.interpret,
            compiler_params=self.compiler_params,
        )(*self.arrays, *self.shared(), *more_arrays)  # fmt: skip

    def ordered(self, blocks: Any, batch: Any, heads: Any) -> tuple:
        """Return the three values in the order of the grid's axes."""
        return blocks, batch, heads

    def placed(self, position: Any, head: Any) -> tuple:
        """Return the two values in the order of the axes of queries, keys and values, or back."""
        return position, head

    def spec(self, shape: tuple, index: Callable[[Any, Any, Any], tuple], **options: Any) -> pl.BlockSpec:
        """Return a spec whose `index` is a function of the block, the row of the batch and the head."""
        return pl.BlockSpec(shape, index, **options)

    def vector(self, shape: tuple, index: Callable[[Any, Any, Any], tuple], **options: Any) -> pl.BlockSpec:
        """Return a spec of vectors along the last axis."""
        return self.spec(shape, index, **options)

    def shared(self) -> tuple:
        """Return the arguments of every kernel after query, key and value."""
        tiles = far = None
        if self.bias is not None:
            tiles, far = getattr(self.bias.tiles, self.kernel), self.bias.far_logits
        return tiles, far, self.mask.q_codes, self.mask.k_codes, self.ranges

    def shared_specs(self) -> tuple:
        """Return the specs of `shared`."""
        tiles = far = None
        if self.bias is not None:
            count, q, k, _, _ = self.plan.rules.tiles(self.block).count, *self.block
            shape = (self.groups, count, k, q) if self.of_keys else (None, count, q, k)
            tiles = self.spec(shape, lambda i, b, h: (h, 0, 0, 0))
            far = self.vector((shape[0], 2), lambda i, b, h: (h, 0), **self.scalars)
        q_codes = k_codes = None
        if self.plan.rules.coded:
            q_codes = self.codes_spec(self.q_length if self.of_keys else self.block.q, is_row=self.of_keys)
            k_codes = self.codes_spec(self.block.k if self.of_keys else self.k_length, is_row=not self.of_keys)
        several = self.ranges.shape[0] > 1
        ranges_shape = (None, *self.ranges.shape[1:])
        ranges = self.spec(ranges_shape, lambda i, b, h: (b if several else 0, 0, 0), **self.scalars)
        return tiles, far, q_codes, k_codes, ranges

    def codes_spec(self, size: int, *, is_row: bool) -> pl.BlockSpec:
        """Return the spec of the codes of a row or of a block of it."""
        return self.vector((None, size), lambda i, b, h: (b, 0 if is_row else i))

    def array(
        self, length: int, heads: int | None, index: Callable[[Any, Any, Any], tuple], *, is_row: bool = False
    ) -> pl.BlockSpec:
        """Return the spec of a row of queries, keys or values, or of a block of it.

        Args:
          index: returns the numbers of the block and of the heads.
        """
        shape = (None, *self.placed(length, heads), self.width)
        options = self.rows if is_row else {}
        return self.spec(shape, lambda i, b, h: (b, *self.placed(*index(i, b, h)), 0), **options)

    def q_block(self) -> pl.BlockSpec:
        return self.array(self.block.q, None, lambda i, b, h: (i, h))

    def k_row(self) -> pl.BlockSpec:
        """Return the spec of all keys that a query head uses."""
        return self.array(self.k_length, None, lambda i, b, h: (0, jax.lax.div(h, self.groups)), is_row=True)

    def q_row(self) -> pl.BlockSpec:
        """Return the spec of all queries of the heads that share a key head."""
        return self.array(self.q_length, self.groups, lambda i, b, h: (0, h), is_row=True)

    def k_block(self) -> pl.BlockSpec:
        return self.array(self.block.k, None, lambda i, b, h: (i, h))

    def q_vector(self) -> pl.BlockSpec:
        return self.vector((None, None, self.block.q), lambda i, b, h: (b, h, i))

    def q_vectors(self) -> pl.BlockSpec:
        return self.vector((None, self.groups, self.q_length), lambda i, b, h: (b, h, 0))


class _TpuCall(_KernelCall):
    """The same for TPUs: [batch, heads, length, width], vectors [batch, heads, 1, q], scalars in SMEM.

    A TPU runs the grid in order, the last axis fastest: the keys of a head stay in VMEM for all blocks of queries, and
    the gradient of the tiles of a head is summed there. TPUs with two cores divide the heads.
    """

    grid = Grid(block=2, batch=1, on_tpu=True)

    def __init__(self, *args: Any):
        from jax.experimental.pallas import tpu

        super().__init__(*args)
        self.tpu, self.scalars = tpu, {"memory_space": tpu.SMEM}
        self.row_bytes = _tpu_row_bytes(*((self.q_length, self.groups) if self.of_keys else (self.k_length, 1)))
        self.rows = {"pipeline_mode": pl.Buffered(1)} if self.row_bytes > _TPU_FEW_BYTES else {}
        self.vector_shape = (*self.vector_shape[:2], 1, self.q_length)

    @property
    def compiler_params(self) -> Any:
        tiles = 0 if self.bias is None else self.plan.rules.tiles(self.block).count
        needed = _tpu_bytes(self.block, tiles, self.groups if self.of_keys else 2, self.row_bytes)
        return self.tpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=needed
        )

    def ordered(self, blocks: Any, batch: Any, heads: Any) -> tuple:
        return heads, batch, blocks

    def placed(self, position: Any, head: Any) -> tuple:
        return head, position

    def spec(self, shape: tuple, index: Callable[[Any, Any, Any], tuple], **options: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda h, b, i: index(i, b, h), **options)

    def vector(self, shape: tuple, index: Callable[[Any, Any, Any], tuple], **options: Any) -> pl.BlockSpec:
        def full_index(i, b, h):
            *front, last = index(i, b, h)
            return *front, 0, last

        return self.spec((*shape[:-1], None, shape[-1]), full_index, **options)

    def shared(self) -> tuple:
        tiles, far, q_codes, k_codes, ranges = super().shared()
        far, q_codes, k_codes = (None if x is None else x[:, None] for x in (far, q_codes, k_codes))
        return tiles, far, q_codes, k_codes, ranges
