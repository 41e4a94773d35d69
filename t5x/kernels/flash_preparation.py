"""What fused attention derives from its mask and its bias before any kernel runs.

Layers that share a mask and a bias share this too: a tower prepares it once (`Ops.prepare_attention`).
"""

import dataclasses
import itertools
import math
from typing import Any, Generic, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from t5x.kernels import flash_kernels as kernels
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.flash_kernels import Block, MaskRules, Tiles

_TILE_DTYPE = jnp.float16  # of the bias: three bits more precise than bfloat16, and its range is ample
_TPU_BLOCK = 256  # queries and keys; not tuned


_Value = TypeVar("_Value")


class PerKernel(NamedTuple, Generic[_Value]):
    """One value for each kernel."""

    forward: _Value
    query: _Value
    key: _Value
    bias: _Value


# The block of `bias` has no more keys than queries, and its sides are multiples of those of `query`.
Blocks = PerKernel[Block]


def choose_blocks(q_length: int, k_length: int, head_dim: int, *, for_tpu: bool = False) -> Blocks:
    """Return the fastest blocks measured (H200, heads of 64; wider heads are not tuned), smaller for short rows."""
    if for_tpu:  # whose vectors have 128 lanes; the gradient of the queries also computes that of the bias
        side = lambda length: min(_TPU_BLOCK, max(128, pl.next_power_of_2(length)))
        return Blocks(*[Block(side(q_length), side(k_length))] * 4)
    if head_dim > 64:
        blocks = Blocks(Block(128, 64, 8, 2), Block(64, 32, 4, 2), Block(32, 64, 4, 2), Block(64, 64, 8, 2))
    elif k_length > 1024:
        blocks = Blocks(Block(128, 64, 8, 3), Block(128, 64, 8, 3), Block(64, 64, 4, 3), Block(128, 64, 4, 2))
    else:
        blocks = Blocks(Block(128, 64, 8, 3), Block(64, 32, 4, 3), Block(64, 64, 4, 3), Block(64, 64, 4, 4))
    most_q, most_k = (max(16, pl.next_power_of_2(length)) for length in (q_length, k_length))
    blocks = Blocks(*(block._replace(q=min(block.q, most_q), k=min(block.k, most_k)) for block in blocks))
    k = min(blocks.bias.k, blocks.bias.q)
    return blocks._replace(bias=blocks.bias._replace(k=k), query=blocks.query._replace(k=min(blocks.query.k, k)))


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Everything static about an attention: what is prepared for one plan fits no other.

    Attributes:
      lengths: of queries and keys, padded to whole blocks.
      extent: the largest distance that the bias is computed for, on each side.
      same_queries: the codes of queries are the same in every row of the batch.
      target: `triton`, or `hopper` if `flash_hopper` computes the forward pass, or `tpu`.
      interpret: run in Pallas's interpreter.
    """

    rules: MaskRules
    blocks: Blocks
    lengths: tuple[int, int]
    extent: int
    same_queries: bool
    target: str
    interpret: Any


def make_plan(
    lengths: tuple[int, int],
    head_dim: int,
    mask: Mask,
    bias: RelativeBias | None,
    *,
    softcap: float | None = None,
    blocks: Blocks | None = None,
    target: str = "triton",
    interpret: Any = False,
) -> BlockPlan:
    """Return the plan of an attention with these numbers of queries and keys; see `flash_attention`.

    Args:
      target: `triton`; `hopper`, where `flash_hopper` may compute the forward pass if it fits; or `tpu`.
    """
    reach = None if bias is None else _reach(bias)
    same_queries = mask.query_segments is None and mask.prefix is None
    may_use_hopper = target == "hopper" and blocks is None and not interpret
    target = "tpu" if target == "tpu" else "triton"
    blocks = choose_blocks(*lengths, head_dim, for_tpu=target == "tpu") if blocks is None else blocks
    if may_use_hopper:
        from t5x.kernels import flash_hopper as hopper  # needs Mosaic

        if hopper.fits(lengths, head_dim, reach):
            target, blocks = "hopper", blocks._replace(forward=hopper.BLOCK)
    if target == "tpu":
        if blocks.bias != blocks.query:
            raise ValueError(f"on TPUs, the bias block {blocks.bias} must be that of the queries, {blocks.query}")
    elif blocks.bias.q % blocks.query.q or blocks.bias.k % blocks.query.k or blocks.bias.q % blocks.bias.k:
        raise ValueError(f"the sides of the bias block {blocks.bias} must be multiples of those of {blocks.query}")
    sides = (math.lcm(*(block.q for block in blocks)), math.lcm(*(block.k for block in blocks)))
    q_padded, k_padded = (length + -length % side for length, side in zip(lengths, sides, strict=True))
    extent = 0 if reach is None else max(reach) + 2 * max(size for block in blocks for size in block[:2])
    coded = mask.key_segments is not None or mask.prefix is not None or k_padded > lengths[1]
    rules = MaskRules(coded, mask.causal, mask.prefix is not None, mask.window, softcap, reach)
    return BlockPlan(rules, blocks, (q_padded, k_padded), extent, same_queries, target, interpret)


class PreparedMask(flax.struct.PyTreeNode):
    """What the kernels need of a mask.

    Attributes:
      q_codes, k_codes: int32 [batch, q] and [batch, k], or None: a query sees the keys with its own code.
      ranges: see `block_ranges`.
      visits, ends: see `_near_visits`; of each device, [tiles, batch * blocks] and [1, 3, tiles]. None without a bias,
        and on TPUs.
    """

    q_codes: jax.Array | None
    k_codes: jax.Array | None
    ranges: PerKernel
    visits: jax.Array | None
    ends: jax.Array | None
    plan: BlockPlan = flax.struct.field(pytree_node=False)

    def fits(self, plan: BlockPlan, batch: int) -> bool:
        """Return whether this was prepared for such an attention."""
        rows = None if self.q_codes is None else self.q_codes.shape[0]
        if self.visits is not None:
            rows = self.visits.shape[1] // (plan.lengths[0] // plan.blocks.bias.q)
        return self.plan == plan and rows in (None, batch)

    @classmethod
    def axes(cls, plan: BlockPlan) -> "PreparedMask":
        """Return the logical axes of every array."""
        ranges = ("batch" if plan.rules.coded else None, None, None)
        rows = ("batch", None)
        axes: dict[str, Any] = {
            "q_codes": rows, "k_codes": rows, "visits": (None, "batch"), "ends": ("batch", None, None)
        }  # fmt: skip
        return cls(**axes, ranges=PerKernel(*[ranges] * 4), plan=plan)


class PreparedBias(flax.struct.PyTreeNode):
    """What the kernels need of a bias. Its gradient flows through `near` and `far` only.

    Attributes:
      near: float32 [heads, tiles, distances], the bias at the q + k - 1 distances of each tile of the bias kernel.
      far: float32 [heads, 2], the bias far to the left and far to the right.
      tiles: [heads, tiles, q, k] of each kernel, in base 2; [heads, tiles, k, q] for the gradients of keys, and a
        strip for a forward pass with `flash_hopper`.
      far_logits: `far` in base 2.
    """

    near: jax.Array
    far: jax.Array
    tiles: PerKernel
    far_logits: jax.Array
    plan: BlockPlan = flax.struct.field(pytree_node=False)

    @classmethod
    def axes(cls, plan: BlockPlan, heads: str | None) -> "PreparedBias":
        """Return the logical axes of every array, where heads are divided over the axis `heads`."""
        tiles: PerKernel[Any] = PerKernel(*[(heads, None, None, None)] * 4)
        if plan.target == "hopper":
            tiles = tiles._replace(forward=(heads, None, None))
        axes: dict[str, Any] = {"near": (heads, None, None), "far": (heads, None), "far_logits": (heads, None)}
        return cls(**axes, tiles=tiles, plan=plan)


def prepare_mask(mask: Mask, batch: int, lengths: tuple[int, int], plan: BlockPlan) -> PreparedMask:
    """Prepare a mask for queries and keys of these `lengths`."""
    key_segments = mask.key_segments
    if key_segments is None and plan.lengths[1] > lengths[1]:
        key_segments = jnp.ones((batch, lengths[1]), jnp.int32)
    q_codes, k_codes = _codes((batch, lengths[0]), key_segments, mask.query_segments, mask.prefix)
    some_queries = q_codes
    if q_codes is not None and k_codes is not None:
        q_more, k_more = (padded - length for padded, length in zip(plan.lengths, lengths, strict=True))
        q_codes = jnp.pad(q_codes, ((0, 0), (0, q_more)), constant_values=-1)
        k_codes = jnp.pad(k_codes, ((0, 0), (0, k_more)))
        # These are constants. XLA evaluates what is computed from them while it compiles, slowly.
        some_queries = q_codes[:1] if plan.same_queries else q_codes
    ranges = PerKernel(
        *(
            block_ranges(plan.rules, block, plan.lengths, some_queries, k_codes, of_keys=kernel == "key")
            for kernel, block in plan.blocks._asdict().items()
        )
    )
    visits = ends = None
    if plan.rules.reach is not None and plan.target != "tpu":
        visits, ends = _near_visits(ranges.bias, plan.rules.tiles(plan.blocks.bias), batch)
    return PreparedMask(q_codes, k_codes, ranges, visits, ends, plan)


def prepare_bias(bias: RelativeBias, plan: BlockPlan) -> PreparedBias:
    """Prepare a bias."""
    # A matmul with one-hot rows: its gradient is a matmul too, while a gather's is a scatter in arbitrary order.
    buckets = bias.buckets(np.arange(-plan.extent, plan.extent + 1))
    one_hot = np.eye(bias.table.shape[1], dtype=np.float32)[buckets]
    values = jnp.einsum("hb,nb->hn", bias.table.astype(jnp.float32), one_hot, precision=jax.lax.Precision.HIGHEST)
    part = lambda start, size: jax.lax.slice_in_dim(values, start, start + size, axis=1)
    far = jnp.concatenate([part(0, 1), part(values.shape[1] - 1, 1)], axis=1)
    block, tiles = plan.blocks.bias, plan.rules.tiles(plan.blocks.bias)
    starts = [number * tiles.unit - (block.q - 1) + plan.extent for number in range(tiles.first, tiles.last + 1)]
    near = jnp.stack([part(start, block.q + block.k - 1) for start in starts], axis=1)
    logits = kernels.LOG2E * jax.lax.stop_gradient(values)
    if plan.target != "tpu":  # TPUs have no float16
        logits = logits.astype(_TILE_DTYPE)

    def tiles_of(kernel: str, block: Block) -> jax.Array:
        if kernel == "forward" and plan.target == "hopper":
            from t5x.kernels import flash_hopper as hopper

            return hopper.bias_strip(logits, tiles.reach)
        return _tiles(logits, block, plan, of_keys=kernel == "key")

    all_tiles = PerKernel(*itertools.starmap(tiles_of, plan.blocks._asdict().items()))
    far_logits = kernels.LOG2E * jax.lax.stop_gradient(far)
    if plan.target == "hopper":  # gradients must use the same numbers as the forward pass, whose strip has these too
        far_logits = far_logits.astype(_TILE_DTYPE).astype(jnp.float32)
    return PreparedBias(near, far, all_tiles, far_logits, plan)


def _tiles(logits: jax.Array, block: Block, plan: BlockPlan, *, of_keys: bool) -> jax.Array:
    """Return the bias [heads, distances] as [heads, tiles, q, k], or transposed."""
    tiles = plan.rules.tiles(block)
    starts = tiles.unit * np.arange(tiles.first, tiles.last + 1) + plan.extent
    distances = np.arange(block.k) - np.arange(block.q)[:, None]
    return logits[:, starts[:, None, None] + (distances.T if of_keys else distances)]


def _reach(bias: RelativeBias) -> tuple[int, int]:
    """Return the distances from which on the bias is constant, to the left and to the right."""
    far = 2 * bias.max_distance + bias.table.shape[1]
    buckets = bias.buckets(np.arange(-far, far + 1))
    sides = (np.flatnonzero(side != side[-1]) for side in (buckets[far::-1], buckets[far:]))
    left, right = (int(different[-1]) + 1 if different.size else 0 for different in sides)
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
    rules: MaskRules, block: Block, lengths: tuple[int, int], q_codes: Any, k_codes: Any, *, of_keys: bool = False
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


def _near_visits(ranges: jax.Array, tiles: Tiles, batch: int) -> tuple[jax.Array, jax.Array]:
    """List the blocks of queries in the batch that use each tile.

    Returns:
      int32 [tiles, batch * blocks], first the blocks where every query sees every key, then the masked ones; and
      int32 [1, 3, tiles]: where the first kind begins, where it ends, and where the second kind ends.
    """
    first, whole_first, whole_last, last = jnp.broadcast_to(ranges, (batch, *ranges.shape[1:])).swapaxes(0, 1)
    i = jnp.arange(ranges.shape[2])
    j = jnp.arange(tiles.first, tiles.last + 1)[:, None, None] + i * (tiles.block.q // tiles.block.k)
    is_visited = ((j >= first) & (j < last)).reshape(tiles.count, -1)
    is_whole = is_visited & ((j >= whole_first) & (j < whole_last)).reshape(tiles.count, -1)
    visits = jnp.argsort(2 - is_visited.astype(jnp.int32) - is_whole, axis=1, stable=True)
    ends = jnp.stack([jnp.zeros(tiles.count), is_whole.sum(1), is_visited.sum(1)])
    return visits.astype(jnp.int32), ends.astype(jnp.int32)[None]
