"""Fused attention for GPUs: T5's bias table and its gradient, packed rows, any length, no [q, k] array.

Every sum has a fixed order, so results are bitwise reproducible. Blocks of queries and keys that do not see each other
are skipped: packed rows cost less than full ones.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x.network import flash_kernels as kernels
from t5x.network.flash_kernels import Block, Rules, Tiles
from t5x.network.relative_position import RelativeBias

_TILE_DTYPE = jnp.float16  # of the bias: three bits more precise than bfloat16, and its range is ample
_BIAS_PROGRAMS = 1024  # programs of the bias gradient's kernel, enough to fill a GPU


class Blocks(NamedTuple):
    """The block of each kernel; `bias` has no more keys than queries, and its sides are multiples of `query`'s."""

    forward: Block
    query: Block
    key: Block
    bias: Block


def choose_blocks(q_length: int, k_length: int, head_dim: int) -> Blocks:
    """Return the fastest blocks measured (H200, heads of 64; wider heads are not tuned), smaller for short rows."""
    if head_dim > 64:
        blocks = Blocks(Block(128, 64, 8, 2), Block(64, 32, 4, 2), Block(32, 64, 4, 2), Block(64, 64, 8, 2))
    elif k_length > 1024:
        blocks = Blocks(Block(128, 64, 8, 3), Block(128, 64, 8, 3), Block(64, 64, 4, 3), Block(128, 64, 4, 2))
    else:
        blocks = Blocks(Block(128, 64, 8, 3), Block(64, 32, 4, 3), Block(64, 64, 4, 3), Block(64, 64, 4, 4))
    fit = lambda size, length: min(size, max(16, pl.next_power_of_2(length)))
    made = Blocks(*(block._replace(q=fit(block.q, q_length), k=fit(block.k, k_length)) for block in blocks))
    k = min(made.bias.k, made.bias.q)
    return made._replace(bias=made.bias._replace(k=k), query=made.query._replace(k=min(made.query.k, k)))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments: the rules, the blocks, and the largest distance that `values` covers on each side.

    Attributes:
      same_queries: the codes of queries are the same in every row of the batch.
    """

    rules: Rules
    blocks: Blocks
    extent: int
    same_queries: bool
    interpret: bool


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: RelativeBias | None = None,
    *,
    key_segments: jax.Array | None = None,
    query_segments: jax.Array | None = None,
    prefix: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute softmax(q·k + bias, where the mask allows) v, differentiable in query, key, value and the bias table.

    Args:
      query: [batch, q, heads, head_dim], bfloat16 or float16.
      key, value: [batch, k, key heads, head_dim]; the number of key heads divides that of the heads.
      bias: relative position bias; None adds nothing.
      key_segments, query_segments, prefix, causal, window: see `Mask`.
      softcap: logits become `softcap * tanh(logits / softcap)` before the bias is added.
      blocks: the block of each kernel; None chooses them by the shapes.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.

    Returns:
      [batch, q, heads, head_dim] in the dtype of `value`; 0 for a query that sees no key.
    """
    q_length, k_length, head_dim = query.shape[1], key.shape[1], query.shape[3]
    blocks = choose_blocks(q_length, k_length, head_dim) if blocks is None else blocks
    if blocks.bias.q % blocks.query.q or blocks.bias.k % blocks.query.k or blocks.bias.q % blocks.bias.k:
        raise ValueError(f"the sides of the bias block {blocks.bias} must be multiples of those of {blocks.query}")
    q_pad = -q_length % math.lcm(*(block.q for block in blocks))
    k_pad = -k_length % math.lcm(*(block.k for block in blocks))
    width_pad = pl.next_power_of_2(max(head_dim, 16)) - head_dim
    if k_pad and key_segments is None:
        key_segments = jnp.ones(key.shape[:2], jnp.int32)
    q_codes, k_codes = _codes(query.shape[:2], key_segments, query_segments, prefix)
    if q_codes is not None:
        q_codes = jnp.pad(q_codes, ((0, 0), (0, q_pad)), constant_values=-1)
        k_codes = jnp.pad(k_codes, ((0, 0), (0, k_pad)))
    values, reach, extent = None, None, 0
    if bias is not None:
        reach = _reach(bias)
        extent = max(reach) + 2 * max(size for block in blocks for size in block[:2])
        # A matmul with one-hot rows: its gradient is a matmul too, while a gather's is a scatter in arbitrary order.
        of = np.eye(bias.table.shape[1], dtype=np.float32)[bias.buckets(np.arange(-extent, extent + 1))]
        values = jnp.einsum("hb,nb->hn", bias.table.astype(jnp.float32), of, precision=jax.lax.Precision.HIGHEST)
    rules = Rules(q_codes is not None, causal, prefix is not None, window, softcap, reach)
    padded = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, width_pad))) if more or width_pad else x
    out = _attention(
        padded(query, q_pad), padded(key, k_pad), padded(value, k_pad).astype(query.dtype), values, q_codes, k_codes,
        _Plan(rules, blocks, extent, query_segments is None and prefix is None, interpret),
    )  # fmt: skip
    return out[:, :q_length, :, :head_dim].astype(value.dtype)


def _reach(bias: RelativeBias) -> tuple[int, int]:
    """Return the distances from which on the bias is constant, to the left and to the right."""
    far = 2 * bias.max_distance + bias.table.shape[1]
    buckets = bias.buckets(np.arange(-far, far + 1))
    different = lambda side: np.flatnonzero(side != side[-1])
    left, right = (int(at[-1]) + 1 if at.size else 0 for at in map(different, (buckets[far::-1], buckets[far:])))
    return left, right


def _codes(
    shape: tuple[int, int],
    key_segments: jax.Array | None,
    query_segments: jax.Array | None,
    prefix: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Encode the mask as int32 [batch, q] and [batch, k]: a query sees the keys with its own code.

    Padding has code -1 in queries and 0 in keys. With a prefix, codes are doubled and their lowest bit marks it.
    """
    if key_segments is None:
        if prefix is None:
            return None, None
        key_segments = jnp.ones(prefix.shape, jnp.int32)
    key_segments = key_segments.astype(jnp.int32)
    if query_segments is None:
        q_codes, k_codes = jnp.ones(shape, jnp.int32), (key_segments > 0).astype(jnp.int32)
    else:
        q_codes, k_codes = jnp.where(query_segments > 0, query_segments, -1).astype(jnp.int32), key_segments
    if prefix is not None:
        marked = (prefix > 0).astype(jnp.int32)
        q_codes = jnp.where(q_codes > 0, 2 * q_codes + marked, -1)
        k_codes = jnp.where(k_codes > 0, 2 * k_codes + marked, 0)
    return q_codes, k_codes


def block_ranges(
    rules: Rules, block: Block, lengths: tuple[int, int], q_codes: Any, k_codes: Any, *, of_keys: bool = False
) -> Any:
    """Return the blocks of keys that each block of queries sees, int32 [batch or 1, 4, blocks].

    The four numbers are: the first block; the start and the end of a run of blocks in which every query sees every key;
    the end. With `of_keys`, return the blocks of queries for each block of keys instead.
    """
    starts = [np.arange(0, length, size) for length, size in zip(lengths, block, strict=False)]
    lowest = starts[1] - (starts[0][:, None] + block.q - 1)
    highest = starts[1] + block.k - 1 - starts[0][:, None]
    some, every = np.ones((1, *lowest.shape), bool), np.ones((1, *lowest.shape), bool)
    cut = lambda codes, size: codes.reshape(codes.shape[0], -1, size)
    if rules.coded:
        q, k = cut(q_codes, block.q), cut(k_codes, block.k)
    if rules.causal:
        some, every = some & (lowest <= 0), every & (highest <= 0)
    if rules.prefix:
        marked = [(codes & 1) * (codes > 0) > 0 for codes in (q, k)]
        pair = lambda q, k: q[:, :, None] & k[:, None, :]
        some = some | pair(*(m.any(-1) for m in marked))
        every = every | pair(*(m.all(-1) for m in marked))
        q, k = q >> 1, k >> 1
    if rules.window is not None:
        some = some & (lowest < rules.window) & (highest > -rules.window)
        every = every & (highest < rules.window) & (lowest > -rules.window)
    if rules.coded:
        (q_least, q_most), (k_least, k_most) = (
            (jnp.where(codes > 0, codes, np.iinfo(np.int32).max).min(-1), codes.max(-1)) for codes in (q, k)
        )
        some = some & (k_least[:, None, :] <= q_most[:, :, None]) & (k_most[:, None, :] >= q_least[:, :, None])
        same = (q.min(-1) == q_most)[:, :, None] & (k.min(-1) == k_most)[:, None, :]
        every = every & same & (q_most[:, :, None] == k_most[:, None, :])
    lib = jnp if rules.coded else np
    if of_keys:
        some, every = lib.swapaxes(some, 1, 2), lib.swapaxes(every, 1, 2)
    whole, count = some & every, some.shape[-1]
    numbers = np.arange(count)
    first, last = lib.where(some, numbers, count).min(-1), lib.where(some, numbers + 1, 0).max(-1)
    whole_first = lib.where(whole, numbers, count).min(-1)
    whole_last = lib.where(~whole & (numbers > whole_first[..., None]), numbers, count).min(-1)
    rows = [lib.where(there, x, 0) for there, x in
            ((last > 0, first), (whole_first < count, whole_first), (whole_first < count, whole_last))]  # fmt: skip
    return jnp.asarray(lib.stack([*rows, last], axis=1), jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(query, key, value, values, q_codes, k_codes, plan):
    return _forward(query, key, value, values, q_codes, k_codes, plan)[0]


def _attention_forward(query, key, value, values, q_codes, k_codes, plan):
    out, lse = _forward(query, key, value, values, q_codes, k_codes, plan)
    return out, (query, key, value, values, q_codes, k_codes, out, lse)


def _attention_backward(plan, residuals, gradient):
    return (*_backward(*residuals, gradient, plan), None, None)


_attention.defvjp(_attention_forward, _attention_backward)


# Jitted separately so that layers with the same shapes share their kernels, which take seconds to compile.


@functools.partial(jax.jit, static_argnames="plan")
def _forward(query, key, value, values, q_codes, k_codes, plan: _Plan) -> tuple[jax.Array, jax.Array]:
    """Return the result and the base-2 log-sum-exp of the logits, float32 [batch, heads, q]."""
    call = _Call(query, key, values, q_codes, k_codes, plan, plan.blocks.forward)
    return call(
        functools.partial(kernels.forward_kernel, rules=plan.rules, block=call.block),
        (call.q_block(), call.k_row(), call.k_row(), *call.shared_specs()),
        (query, key, value, *call.shared()),
        (call.q_block(), call.q_vector()),
        (_like(query), jax.ShapeDtypeStruct(call.vector_shape, jnp.float32)),
    )


@functools.partial(jax.jit, static_argnames="plan")
def _backward(query, key, value, values, q_codes, k_codes, out, lse, gradient, plan: _Plan):
    """Return the gradients of query, key, value and values."""
    arrays = query, key, value, values, q_codes, k_codes
    d_query, delta, d_far = _query_gradient(*arrays, out, lse, gradient, plan)
    d_key, d_value = _key_gradient(*arrays, lse, delta, gradient, plan)
    if values is None:
        return d_query, d_key, d_value, None
    d_values = _near_gradient(*arrays, lse, delta, gradient, plan)
    d_far = jnp.pad(d_far.sum((0, 3))[..., None], ((0, 0), (0, 0), (0, values.shape[1] - 1)))
    return d_query, d_key, d_value, d_values + d_far[:, 0] + d_far[:, 1, ::-1]


def _query_gradient(query, key, value, values, q_codes, k_codes, out, lse, gradient, plan: _Plan):
    """Return the gradient of query, delta [batch, heads, q], and that of far logits [batch, heads, 2, q] or None."""
    call = _Call(query, key, values, q_codes, k_codes, plan, plan.blocks.query)
    block = call.block
    far = far_shape = None
    if values is not None:
        far = pl.BlockSpec((None, None, 2, block.q), lambda i, b, h: (b, h, 0, i))
        far_shape = jax.ShapeDtypeStruct((*call.vector_shape[:2], 2, call.vector_shape[2]), jnp.float32)
    return call(
        functools.partial(
            kernels.query_gradient_kernel, rules=plan.rules, block=block, bias_block=plan.blocks.bias
        ),
        (call.q_block(), call.k_row(), call.k_row(), *call.shared_specs(), call.q_block(), call.q_vector(),
         call.q_block()),
        (query, key, value, *call.shared(), out, lse, gradient),
        (call.q_block(), call.q_vector(), far),
        (_like(query), jax.ShapeDtypeStruct(call.vector_shape, jnp.float32), far_shape),
    )  # fmt: skip


def _key_gradient(query, key, value, values, q_codes, k_codes, lse, delta, gradient, plan: _Plan):
    """Return the gradients of key and value."""
    call = _Call(query, key, values, q_codes, k_codes, plan, plan.blocks.key, of_keys=True)
    return call(
        functools.partial(kernels.key_gradient_kernel, rules=plan.rules, block=call.block, groups=call.groups),
        (call.q_row(), call.k_block(), call.k_block(), *call.shared_specs(), call.q_vectors(), call.q_vectors(),
         call.q_row()),
        (query, key, value, *call.shared(), lse, delta, gradient),
        (call.k_block(), call.k_block()),
        (_like(key), _like(value)),
    )  # fmt: skip


def _near_gradient(query, key, value, values, q_codes, k_codes, lse, delta, gradient, plan: _Plan) -> jax.Array:
    """Return the gradient of `values` from near blocks, float32 [heads, distances]."""
    batch, q_length, heads, width = query.shape
    call = _Call(query, key, values, q_codes, k_codes, plan, plan.blocks.bias)
    block, tiles = call.block, Tiles(call.block, plan.rules.reach)
    visits, counts = _near_visits(call.ranges, tiles, batch)
    parts = max(1, min(visits.shape[1], _BIAS_PROGRAMS // (heads * tiles.count)))
    whole = lambda array: None if array is None else pl.BlockSpec(array.shape, lambda t, h, p: (0,) * array.ndim)
    rows = lambda array, group: pl.BlockSpec(
        (batch, array.shape[1], None, width), lambda t, h, p: (0, 0, jax.lax.div(h, group), 0)
    )
    vector = pl.BlockSpec((batch, None, q_length), lambda t, h, p: (0, h, 0))
    made = call.tiles()
    sums = pl.pallas_call(
        functools.partial(kernels.bias_gradient_kernel, rules=plan.rules, block=block, blocks=q_length // block.q),
        grid=(tiles.count, heads, parts),
        in_specs=(
            rows(query, 1), rows(key, call.groups), rows(value, call.groups),
            pl.BlockSpec((None, *made.shape[1:]), lambda t, h, p: (h, 0, 0, 0)),
            whole(q_codes), whole(k_codes), whole(visits), whole(counts), vector, vector, rows(gradient, 1),
        ),
        out_specs=pl.BlockSpec((None, None, None, block.q, block.k), lambda t, h, p: (p, h, t, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((parts, heads, tiles.count, block.q, block.k), jnp.float32),
        interpret=plan.interpret,
        compiler_params=call.compiler_params,
    )(query, key, value, made, q_codes, k_codes, visits, counts, lse, delta, gradient)  # fmt: skip
    sums = _sum_diagonals(sums.sum(0))
    d_values = 0.0
    for number in range(tiles.count):
        before = (tiles.first + number) * tiles.unit - (block.q - 1) + plan.extent
        behind = values.shape[1] - sums.shape[-1] - before
        d_values += jnp.pad(sums[:, number], ((0, 0), (before, behind)))
    return d_values


def _near_visits(ranges: jax.Array, tiles: Tiles, batch: int) -> tuple[jax.Array, jax.Array]:
    """List the blocks of queries in the batch that use each tile.

    Returns:
      int32 [tiles, batch * blocks], first the blocks where every query sees every key, then the masked ones; and
      int32 [3, tiles]: where the first kind begins, where it ends, and where the second kind ends.
    """
    first, whole_first, whole_last, last = jnp.broadcast_to(ranges, (batch, *ranges.shape[1:])).swapaxes(0, 1)
    i = jnp.arange(ranges.shape[2])
    j = jnp.arange(tiles.first, tiles.last + 1)[:, None, None] + i * (tiles.block.q // tiles.block.k)
    is_visited = ((j >= first) & (j < last)).reshape(tiles.count, -1)
    is_whole = is_visited & ((j >= whole_first) & (j < whole_last)).reshape(tiles.count, -1)
    visits = jnp.argsort(2 - is_visited.astype(jnp.int32) - is_whole, axis=1, stable=True)
    ends = jnp.stack([jnp.zeros(tiles.count), is_whole.sum(1), is_visited.sum(1)])
    return visits.astype(jnp.int32), ends.astype(jnp.int32)


def _sum_diagonals(x: jax.Array) -> jax.Array:
    """Sum each diagonal, [..., q, k] -> [..., q + k - 1], ordered by j - i."""
    *others, q, k = x.shape
    flat = jnp.pad(x, (*[(0, 0)] * len(others), (0, 0), (0, q - 1))).reshape(*others, -1)
    # Reshaped to rows that are longer by one, each row is shifted by one relative to the previous row.
    skewed = jnp.pad(flat, (*[(0, 0)] * len(others), (0, q))).reshape(*others, q, q + k)
    return jnp.roll(skewed.sum(-2), q - 1, axis=-1)[..., :-1]


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


class _Call:
    """The block specs and arguments shared by the kernels with the grid (blocks, batch, heads)."""

    def __init__(self, query, key, values, q_codes, k_codes, plan: _Plan, block: Block, *, of_keys: bool = False):
        self.plan, self.block, self.of_keys, self.values = plan, block, of_keys, values
        self.batch, self.q_length, heads, self.width = query.shape
        self.k_length, self.k_heads = key.shape[1:3]
        self.groups = heads // self.k_heads
        self.heads = self.k_heads if of_keys else heads
        self.vector_shape = (self.batch, heads, self.q_length)
        self.codes = q_codes, k_codes
        lengths = (self.q_length, self.k_length)
        # These are constants. XLA evaluates what is computed from them while it compiles, slowly.
        some_queries = q_codes[:1] if plan.rules.coded and plan.same_queries else q_codes
        self.ranges = block_ranges(plan.rules, block, lengths, some_queries, k_codes, of_keys=of_keys)
        self.compiler_params = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)

    def __call__(self, kernel, in_specs, arrays, out_specs, out_shape) -> Any:
        blocks = self.k_length // self.block.k if self.of_keys else self.q_length // self.block.q
        return pl.pallas_call(
            kernel, grid=(blocks, self.batch, self.heads), in_specs=in_specs, out_specs=out_specs,
            out_shape=out_shape, interpret=self.plan.interpret, compiler_params=self.compiler_params,
        )(*arrays)  # fmt: skip

    def tiles(self) -> jax.Array:
        """Return the bias tiles in base 2, [heads, tiles, q, k], or transposed."""
        tiles = Tiles(self.block, self.plan.rules.reach)
        starts = tiles.unit * jnp.arange(tiles.first, tiles.last + 1) + self.plan.extent
        distances = jnp.arange(self.block.k) - jnp.arange(self.block.q)[:, None]
        at = starts[:, None, None] + (distances.T if self.of_keys else distances)
        return (kernels.LOG2E * self.values).astype(_TILE_DTYPE)[:, at]

    def shared(self) -> tuple:
        """Return the arguments of every kernel after query, key and value."""
        if self.values is None:
            return None, None, *self.codes, self.ranges
        far = kernels.LOG2E * self.values[:, jnp.array([0, -1])]
        return self.tiles(), far, *self.codes, self.ranges

    def shared_specs(self) -> tuple:
        """Return the specs of `shared`."""
        tiles = far = None
        if self.values is not None:
            count, q, k, _, _ = Tiles(self.block, self.plan.rules.reach).count, *self.block
            shape = (self.groups, count, k, q) if self.of_keys else (None, count, q, k)
            tiles = pl.BlockSpec(shape, lambda i, b, h: (h, 0, 0, 0))
            far = pl.BlockSpec((shape[0], 2), lambda i, b, h: (h, 0))
        q_codes = k_codes = None
        if self.plan.rules.coded:
            block = lambda size: pl.BlockSpec((None, size), lambda i, b, h: (b, i))
            row = lambda size: pl.BlockSpec((None, size), lambda i, b, h: (b, 0))
            q_codes = row(self.q_length) if self.of_keys else block(self.block.q)
            k_codes = block(self.block.k) if self.of_keys else row(self.k_length)
        several = self.ranges.shape[0] > 1
        ranges = pl.BlockSpec((None, *self.ranges.shape[1:]), lambda i, b, h: (b if several else 0, 0, 0))
        return tiles, far, q_codes, k_codes, ranges

    def q_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.block.q, None, self.width), lambda i, b, h: (b, i, h, 0))

    def q_vector(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.block.q), lambda i, b, h: (b, h, i))

    def k_row(self) -> pl.BlockSpec:
        """Return the spec of all keys that a query head uses."""
        return pl.BlockSpec(
            (None, self.k_length, None, self.width), lambda i, b, h: (b, 0, jax.lax.div(h, self.groups), 0)
        )

    def q_row(self) -> pl.BlockSpec:
        """Return the spec of all queries of the heads that share a key head."""
        return pl.BlockSpec((None, self.q_length, self.groups, self.width), lambda i, b, h: (b, 0, h, 0))

    def q_vectors(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.groups, self.q_length), lambda i, b, h: (b, h, 0))

    def k_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.block.k, None, self.width), lambda i, b, h: (b, i, h, 0))
