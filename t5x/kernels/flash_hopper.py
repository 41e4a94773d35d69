"""The forward kernel of fused attention for Hopper GPUs (H100, H200), with their asynchronous copies and matmuls.

A thread block stays on its multiprocessor and computes blocks of queries of one head, one after the other. One
warpgroup loads them and their keys and values; two others compute 64 queries each, and take turns: one multiplies while
the other computes its softmax. The bias of the head stays in shared memory as a strip whose columns are consecutive
distances. The result is that of `flash_kernels.forward_kernel` up to rounding.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from t5x.kernels.flash_kernels import LOG2E, MASKED, UNSEEN, Block, MaskRules, visible
from t5x.partitioning.devices import device

_COMPUTING = 2  # warpgroups
_ROWS = 64  # queries of a warpgroup
_STAGES = 2  # blocks of keys and values that are loaded ahead
_WIDTH = 64  # of a head; wider heads were not measured, and need smaller blocks
_MOST_STRIP_BYTES = 96 * 1024  # what the other buffers leave free of 227 KB
_INDEX = () if jax.__version_info__ >= (0, 11) else ((),)  # JAX 0.10 asks `mosaic.load` for an index

BLOCK = Block(_COMPUTING * _ROWS, 128)


def fits(lengths: tuple[int, int], width: int, reach: tuple[int, int] | None) -> bool:
    """Return whether the kernel takes queries and keys of these lengths, heads of this width, and the bias."""
    first, last = _strip_tiles(reach or (0, 0))
    strip_bytes = 2 * _ROWS * _ROWS * (last - first)
    return width == _WIDTH and min(lengths) > _ROWS and strip_bytes <= _MOST_STRIP_BYTES


def _strip_tiles(reach: tuple[int, int]) -> tuple[int, int]:
    """Return the range of the strip, in units of `_ROWS` distances from the first query of a warpgroup.

    A block of keys left of it has the same bias throughout as its first columns, a block right of it as its last ones.
    """
    wide = BLOCK.k // _ROWS
    return -math.ceil((reach[0] - 1) / _ROWS) - wide, math.ceil((reach[1] + _ROWS - 1) / _ROWS) + wide


def bias_strip(logits: jax.Array, reach: tuple[int, int]) -> jax.Array:
    """Return the bias of `_ROWS` queries, [heads, _ROWS, distances].

    Args:
      logits: the bias in base 2 by distance, 16-bit [heads, 2 * extent + 1] for distances from -extent to extent.
      reach: see `MaskRules`.
    """
    first, last = _strip_tiles(reach)
    extent = logits.shape[1] // 2
    distances = jnp.arange(first * _ROWS, last * _ROWS) - jnp.arange(_ROWS)[:, None]
    return logits[:, jnp.clip(distances, -extent, extent) + extent]


class _Buffers(NamedTuple):
    """Shared memory. Two blocks of queries and `_STAGES` blocks of keys and values are loaded ahead."""

    query: Any
    key: Any
    value: Any
    strip: Any
    out: Any
    lse: Any


class _Barriers(NamedTuple):
    """Barriers of the buffers: the copies into one are complete; its users have finished. `turn`: of the computing."""

    query_full: Any
    key_full: Any
    value_full: Any
    strip_full: Any
    query_free: Any
    key_free: Any
    value_free: Any
    turn: Any


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    strip: jax.Array | None,
    q_codes: jax.Array | None,
    k_codes: jax.Array | None,
    ranges: jax.Array,
    rules: MaskRules,
) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the base-2 log-sum-exp of its logits, float32 [batch, heads, q].

    Args:
      query, key, value: [batch, length, heads, 64] in bfloat16 or float16; lengths are multiples of those of `BLOCK`.
      strip: see `bias_strip`; None without a bias.
      q_codes, k_codes, ranges: see `PreparedMask`; the ranges are those of `BLOCK`.
    """
    batch, q_length, heads, width = query.shape
    groups = heads // key.shape[2]
    blocks = q_length // BLOCK.q
    processors = getattr(device(), "core_count", 132)
    parts = max(1, min(batch * blocks, processors // heads))
    swizzled = (mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128))
    array = lambda *shape: mosaic.SMEM(shape, query.dtype, transforms=swizzled)
    full = lambda count: mosaic.Barrier(num_barriers=count)
    free = lambda count: mosaic.Barrier(num_barriers=count, num_arrivals=_COMPUTING)
    buffers = _Buffers(
        query=array(2, BLOCK.q, width),
        key=array(_STAGES, BLOCK.k, width),
        value=array(_STAGES, BLOCK.k, width),
        strip=None if strip is None else mosaic.SMEM(strip.shape[1:], strip.dtype, transforms=swizzled),
        out=array(BLOCK.q, width),
        lse=mosaic.SMEM((BLOCK.q,), jnp.float32),
    )
    barriers = _Barriers(
        full(2), full(_STAGES), full(_STAGES), full(1), free(2), free(_STAGES), free(_STAGES),
        turn=mosaic.Barrier(num_arrivals=_COMPUTING),
    )  # fmt: skip

    def attention_forward_kernel(query_ref, key_ref, value_ref, strip_ref, q_codes, k_codes, ranges, out_ref, lse_ref):
        def item(number):
            """Return the row and the block of queries of an item of this thread block, and `block_ranges` of it."""
            work_item = lax.axis_index("part") + number * parts
            row = lax.div(work_item, jnp.int32(blocks))
            block = work_item - row * blocks
            range_row = row if ranges.shape[0] > 1 else 0
            start, whole_first, whole_last, stop = (ranges[range_row, n, block] for n in range(4))
            # Visits a masked block rather than none: with blocks of queries that visit none, the kernel does not end.
            return row, block, (start, whole_first, whole_last, jnp.maximum(stop, start + 1))

        def work(buffers, barriers):
            items = lax.div(batch * blocks - lax.axis_index("part") + parts - 1, jnp.int32(parts))
            head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")

            @pl.when(warpgroup == _COMPUTING)
            def load():
                mosaic.set_max_registers(40, action="decrease")
                if strip_ref is not None:
                    mosaic.copy_gmem_to_smem(strip_ref.at[head], buffers.strip, barriers.strip_full.at[0])
                key_head = lax.div(head, jnp.int32(groups))
                sources = (
                    lambda row, positions: query_ref.at[row, positions, head],
                    lambda row, positions: key_ref.at[row, positions, key_head],
                    lambda row, positions: value_ref.at[row, positions, key_head],
                )
                lax.fori_loop(0, items, lambda n, step: _load_item(sources, buffers, barriers, item(n), n, step), 0)

            @pl.when(warpgroup < _COMPUTING)
            def compute():
                mosaic.set_max_registers(232, action="increase")
                if strip_ref is not None:
                    mosaic.barrier_wait(barriers.strip_full.at[0])
                pl.when(warpgroup == 1)(lambda: _pass_turn(barriers))
                codes = (q_codes, k_codes) if rules.coded else None
                outs = (out_ref.at[:, :, head], lse_ref.at[:, head])
                lax.fori_loop(
                    0, items, lambda n, step: _compute_item(rules, codes, outs, buffers, barriers, item(n), n, step), 0
                )
                pl.when(warpgroup == 0)(lambda: _pass_turn(barriers))
                mosaic.wait_smem_to_gmem(0)

        pl.run_scoped(work, buffers, barriers, collective_axes="warpgroup")

    return mosaic.kernel(
        attention_forward_kernel,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32),
        ),
        grid=(heads, parts),
        grid_names=("head", "part"),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=mosaic.CompilerParams(approx_math=True),
    )(query, key, value, strip, q_codes, k_codes, ranges)


def _pass_turn(barriers: _Barriers) -> None:
    """Let the other computing warpgroup multiply; wait until it has."""
    mosaic.barrier_arrive(barriers.turn)
    mosaic.barrier_wait(barriers.turn)


def _load_item(sources: tuple, buffers: _Buffers, barriers: _Barriers, item: tuple, number: Any, step: Any) -> Any:
    """Load the queries of an item and the keys and values that they see; return the number of the next step.

    Args:
      sources: (row, range of positions) -> queries, keys, values in global memory.
      step: number of blocks of keys loaded before, for all items.
    """
    query, key, value = sources
    row, block, (start, _, _, stop) = item
    slot = lax.rem(number, jnp.int32(2))
    pl.when(number >= 2)(lambda: mosaic.barrier_wait(barriers.query_free.at[slot]))
    queries = query(row, pl.ds(block * BLOCK.q, BLOCK.q))
    mosaic.copy_gmem_to_smem(queries, buffers.query.at[slot], barriers.query_full.at[slot])

    def load(source, buffer, is_full, is_free, j, step):
        slot = lax.rem(step, jnp.int32(_STAGES))
        pl.when(step >= _STAGES)(lambda: mosaic.barrier_wait(is_free.at[slot]))
        mosaic.copy_gmem_to_smem(source(row, pl.ds(j * BLOCK.k, BLOCK.k)), buffer.at[slot], is_full.at[slot])

    def load_both(j, step):
        load(key, buffers.key, barriers.key_full, barriers.key_free, j, step)
        load(value, buffers.value, barriers.value_full, barriers.value_free, j, step)
        return step + 1

    return lax.fori_loop(start, stop, load_both, step)


def _compute_item(
    rules: MaskRules, codes: tuple | None, outs: tuple, buffers: _Buffers, barriers: _Barriers, item, number, step
) -> Any:
    """Compute and store the result of this warpgroup's queries; return the number of the next step."""
    warpgroup = lax.axis_index("warpgroup")
    row, block, (start, whole_first, whole_last, stop) = item
    slot = lax.rem(number, jnp.int32(2))
    mine = pl.ds(warpgroup * _ROWS, _ROWS)
    q_start = block * BLOCK.q + warpgroup * _ROWS
    by_row = mosaic.Layout.WGMMA.reduce(1)
    spread = lambda vector, like: lax.broadcast_in_dim(vector, like.shape, [0])
    mosaic.barrier_wait(barriers.query_full.at[slot])

    def visit(j, carry):
        total, highest, weight, step = carry
        slot_of_keys = lax.rem(step, jnp.int32(_STAGES))
        mosaic.barrier_wait(barriers.key_full.at[slot_of_keys])

        def multiply(logits):
            mosaic.wgmma(logits, buffers.query.at[slot, mine], buffers.key.at[slot_of_keys].transpose((1, 0)))
            _pass_turn(barriers)
            return logits[...]

        logits = pl.run_scoped(multiply, mosaic.ACC((_ROWS, BLOCK.k), jnp.float32))
        mosaic.barrier_arrive(barriers.key_free.at[slot_of_keys])
        if rules.softcap is not None:
            logits = rules.softcap * jnp.tanh(logits / rules.softcap)
        logits = logits * LOG2E
        if rules.reach is not None:
            columns = pl.ds(pl.multiple_of(strip_column(rules.reach, j * BLOCK.k - q_start), _ROWS), BLOCK.k)
            logits += mosaic.layout_cast(buffers.strip[:, columns], mosaic.Layout.WGMMA).astype(jnp.float32)
        if rules.masks:
            mask = lambda logits: _masked(rules, codes, row, q_start, j * BLOCK.k, logits)
            logits = lax.cond((j >= whole_first) & (j < whole_last), lambda logits: logits, mask, logits)
        new = jnp.maximum(highest, logits.max(axis=1))
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(logits - spread(new, logits))
        weight = weight * shrink + weights.sum(axis=1)
        total = total * spread(shrink, total)
        # Nothing of the softmax may be delayed until after the turn.
        total, weight, new, weights = lax.optimization_barrier((total, weight, new, weights.astype(total_dtype)))
        mosaic.barrier_arrive(barriers.turn)
        mosaic.barrier_wait(barriers.value_full.at[slot_of_keys])
        mosaic.barrier_wait(barriers.turn)
        add = lambda total: mosaic.wgmma(total, weights, buffers.value.at[slot_of_keys])
        total = pl.run_state(add)(mosaic.ACC.init(total))
        mosaic.barrier_arrive(barriers.value_free.at[slot_of_keys])
        return total, new, weight, step + 1

    total_dtype = buffers.value.dtype
    vector = lambda number: mosaic.layout_cast(jnp.full(_ROWS, number, jnp.float32), by_row)
    zeros = mosaic.layout_cast(jnp.zeros((_ROWS, _WIDTH), jnp.float32), mosaic.Layout.WGMMA)
    carry = zeros, vector(MASKED), vector(0.0), step
    total, highest, weight, step = lax.fori_loop(start, stop, visit, carry)
    mosaic.barrier_arrive(barriers.query_free.at[slot])
    is_seen = highest > 0.5 * MASKED
    weight = jnp.where(is_seen, weight, 1.0)
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)  # of the previous item
    buffers.out[mine] = (total * spread(jnp.where(is_seen, 1.0 / weight, 0.0), total)).astype(buffers.out.dtype)
    buffers.lse[mine] = jnp.where(is_seen, highest + jnp.log(weight) * LOG2E, UNSEEN)
    mosaic.commit_smem()
    out, lse = outs
    mosaic.copy_smem_to_gmem(buffers.out.at[mine], out.at[row, pl.ds(q_start, _ROWS)])
    mosaic.copy_smem_to_gmem(buffers.lse.at[mine], lse.at[row, pl.ds(q_start, _ROWS)])
    return step


def strip_column(reach: tuple[int, int], distance: Any) -> Any:
    """Return where a strip has the bias of a block whose first key is at this distance from its first query."""
    first, last = _strip_tiles(reach)
    tile = jnp.clip(lax.div(jnp.int32(distance), jnp.int32(_ROWS)), first, last - BLOCK.k // _ROWS)
    return (tile - first) * _ROWS


def _masked(
    rules: MaskRules, codes: tuple | None, row: Any, q_start: Any, k_start: Any, logits: jax.Array
) -> jax.Array:
    layout = mosaic.Layout.WGMMA
    q = k = distance = None
    if codes is not None:
        load = lambda ref, start, size, axis: lax.broadcast_in_dim(
            mosaic.load(ref.at[row, pl.ds(start, size)], *_INDEX, layout=layout.reduce(1 - axis), optimized=False),
            logits.shape, [axis],
        )  # fmt: skip
        q, k = load(codes[0], q_start, _ROWS, 0), load(codes[1], k_start, BLOCK.k, 1)
    if rules.causal or rules.window is not None:
        iota = lambda axis: mosaic.broadcasted_iota(jnp.int32, logits.shape, axis, layout=layout)
        distance = (k_start + iota(1)) - (q_start + iota(0))
    return jnp.where(visible(rules, q, k, distance), logits, MASKED)
