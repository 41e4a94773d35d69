"""Pallas kernels of fused attention: forward, gradients, and the bias gradient, each without a [q, k] array.

The bias depends only on key position minus query position and is constant beyond some distance. A block of queries
and keys is therefore either *near*, and adds one of a few precomputed tiles, or far on one side, and adds a scalar.
Logits are in base 2, because the hardware implements `exp2`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LOG2E = 1.4426950408889634
MASKED = -1e30
LANES = 128  # of a TPU's vectors
UNSEEN = 1e30  # log-sum-exp of a query that sees no key, so that all its weights become 0


class Block(NamedTuple):
    """The block shape of a kernel and how Triton compiles it; one of `q` and `k` is a multiple of the other."""

    q: int
    k: int
    warps: int = 4
    stages: int = 2


class Grid(NamedTuple):
    """The axes of a kernel's grid for blocks and for rows of the batch; on TPUs, arrays have heads before positions."""

    block: int
    batch: int
    on_tpu: bool

    def loaded(self, vector: jax.Array) -> jax.Array:
        """Return a vector from memory for use with the rows of matrices: on TPUs along the sublanes, not the lanes."""
        return jnp.broadcast_to(vector[None, :], (LANES, vector.size)).T[:, 0] if self.on_tpu else vector

    def stored(self, vector: jax.Array) -> jax.Array:
        """Return a vector of sums or maxima of rows for memory, the inverse of `loaded`."""
        return jnp.broadcast_to(vector[:, None], (vector.size, LANES)).T[0] if self.on_tpu else vector


@dataclasses.dataclass(frozen=True)
class MaskRules:
    """The static options of a kernel.

    Attributes:
      coded: queries and keys have codes; a query sees the keys with its own code.
      causal: a query sees no key after it.
      prefix: for a causal mask; the lowest bit of a code marks a prefix, whose positions see each other.
      window: a query sees keys at distances below this.
      softcap: logits are `softcap * tanh(logits / softcap)` before the bias is added.
      reach: the bias is constant at distances of at least `reach[0]` to the left and `reach[1]` to the right; None
        without a bias.
    """

    coded: bool = False
    causal: bool = False
    prefix: bool = False
    window: int | None = None
    softcap: float | None = None
    reach: tuple[int, int] | None = None

    @property
    def masks(self) -> bool:
        return self.coded or self.causal or self.window is not None

    @property
    def sees_ahead(self) -> bool:
        return not self.causal or self.prefix

    def tiles(self, block: Block) -> "Tiles":
        """Return the near blocks; there are none without a bias."""
        if self.reach is None:
            raise ValueError("attention without a bias has no near blocks")
        return Tiles(block, self.reach)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The near blocks: those whose first key minus first query is `unit * n`, n from `first` to `last`."""

    block: Block
    reach: tuple[int, int]

    @property
    def unit(self) -> int:
        return min(self.block.q, self.block.k)

    @property
    def first(self) -> int:
        return -((self.reach[0] + self.block.k - 2) // self.unit)

    @property
    def last(self) -> int:
        return (self.reach[1] + self.block.q - 2) // self.unit

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def number(self, i: Any, j: Any) -> Any:
        """Return the number of the tile for the block of queries i and keys j."""
        return j * (self.block.k // self.unit) - i * (self.block.q // self.unit) - self.first

    def near_keys(self, i: Any) -> tuple[Any, Any]:
        """Return the range of blocks of keys that are near the block of queries i."""
        ahead, step = i * (self.block.q // self.unit), self.block.k // self.unit
        return _ceil_div(self.first + ahead, step), _ceil_div(self.last + ahead + 1, step)

    def near_queries(self, j: Any) -> tuple[Any, Any]:
        """Return the range of blocks of queries that are near the block of keys j."""
        ahead, step = j * (self.block.k // self.unit), self.block.q // self.unit
        return _ceil_div(ahead - self.last, step), _ceil_div(ahead - self.first + 1, step)


def _ceil_div(x: Any, by: int) -> Any:
    """Divide a traced number above -2**20, rounding up; `lax.div` rounds towards 0."""
    return x if by == 1 else lax.div(x + (by << 20) + by - 1, jnp.int32(by)) - (1 << 20)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _product_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a @ b.T."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


class _Logits(NamedTuple):
    """A function that computes the logits of a block in base 2, [q, k] or transposed.

    Attributes:
      tiles, far: references to the bias; None without one.
      codes: returns the codes of a block's queries and keys, given the starts of both; None without codes.
      head: the index of this head if the references hold several.
    """

    rules: MaskRules
    block: Block
    tiles: Any
    far: Any
    codes: Callable[[Any, Any], tuple[jax.Array, jax.Array]] | None
    grid: Grid
    head: tuple = ()
    transposed: bool = False

    def __call__(self, kind: str, i: Any, j: Any, query: jax.Array, key: jax.Array, is_whole: Any) -> Any:
        """Return the logits of the block of queries i and keys j.

        Args:
          kind: `near`, `left`, `right`, or `plain` (no bias).
          is_whole: whether every query of the block sees every key, traced or not.

        Returns:
          the logits, and the factor that `softcap` applies to their gradient (None without it).
        """
        logits = _product_transposed(key, query) if self.transposed else _product_transposed(query, key)
        slope = None
        if self.rules.softcap is not None:
            bent = jnp.tanh(logits / self.rules.softcap)
            logits, slope = self.rules.softcap * bent, 1.0 - bent * bent
        logits = logits * LOG2E
        if kind == "near":
            number = self.rules.tiles(self.block).number(i, j)
            logits += self.tiles[(*self.head, number, slice(None), slice(None))].astype(jnp.float32)
        elif kind != "plain":
            logits += self.far[(*self.head, 0 if kind == "left" else 1)]
        if is_whole is False:
            logits = self._masked(i, j, logits)
        elif is_whole is not True:
            logits = lax.cond(is_whole, lambda x: x, functools.partial(self._masked, i, j), logits)
        return logits, slope

    def _masked(self, i: Any, j: Any, logits: jax.Array) -> jax.Array:
        rules, axis = self.rules, int(self.transposed)
        q_start, k_start = i * self.block.q, j * self.block.k
        q = k = distance = None
        if self.codes is not None:
            q, k = self.codes(q_start, k_start)
            q, k = (q, self.grid.loaded(k)) if self.transposed else (self.grid.loaded(q), k)
            q, k = jnp.expand_dims(q, 1 - axis), jnp.expand_dims(k, axis)
        if rules.causal or rules.window is not None:
            q_numbers, k_numbers = (lax.broadcasted_iota(jnp.int32, logits.shape, n) for n in (axis, 1 - axis))
            distance = (k_start + k_numbers) - (q_start + q_numbers)
        return jnp.where(visible(rules, q, k, distance), logits, MASKED)


def visible(rules: MaskRules, q: jax.Array | None, k: jax.Array | None, distance: jax.Array | None) -> jax.Array:
    """Return which keys are seen by which queries, given their codes and key position minus query position."""
    allowed: list[jax.Array] = []
    if q is not None and k is not None:
        allowed.append((q >> 1) == (k >> 1) if rules.prefix else q == k)
    if distance is not None and rules.causal:
        before = distance <= 0
        allowed.append(before | ((q & k & 1) > 0) if rules.prefix and q is not None and k is not None else before)
    if distance is not None and rules.window is not None:
        allowed.append(jnp.abs(distance) < rules.window)
    return functools.reduce(jnp.logical_and, allowed)


def _visit_all(
    rules: MaskRules, kinds: tuple[str, str], ranges: Any, number: Any, near: tuple | None, visit: Callable, carry: Any
) -> Any:
    """Visit the blocks that block `number` sees, in order: far ones, `near` ones, far ones on the other side.

    Args:
      kinds: of the far blocks on both sides.
      visit: called with the kind of a block, whether it needs no mask, its number, and the carry.
    """
    start, whole_first, whole_last, stop = (ranges[n, number] for n in range(4))

    def visit_block(kind, n, carry):
        # A branch in the loop was faster than a second loop without masks: registers are allocated for all loops.
        is_whole = (n >= whole_first) & (n < whole_last) if rules.masks else True
        return visit(kind, is_whole, n, carry)

    if near is None:
        return lax.fori_loop(start, stop, functools.partial(visit_block, "plain"), carry)
    first = jnp.clip(near[0], start, stop)
    last = jnp.clip(near[1], first, stop)
    for kind, begin, end in ((kinds[0], start, first), ("near", first, last), (kinds[1], last, stop)):
        if kind != "right" or rules.sees_ahead:
            carry = lax.fori_loop(begin, end, functools.partial(visit_block, kind), carry)
    return carry


def forward_kernel(
    query_ref, key_ref, value_ref, tiles_ref, far_ref, q_codes_ref, k_codes_ref, ranges_ref, out_ref, lse_ref,
    *, rules: MaskRules, block: Block, grid: Grid,
):  # fmt: skip
    """Compute the output of one block of queries of one head."""
    i = pl.program_id(grid.block)
    query = query_ref[...]
    codes = (lambda _, k: (q_codes_ref[...], k_codes_ref[pl.ds(k, block.k)])) if rules.coded else None
    logits_of = _Logits(rules, block, tiles_ref, far_ref, codes, grid)
    near = None if rules.reach is None else rules.tiles(block).near_keys(i)

    def visit(kind, is_whole, j, carry):
        total, highest, weight = carry
        keys = pl.ds(j * block.k, block.k)
        value = value_ref[keys, :]
        logits, _ = logits_of(kind, i, j, query, key_ref[keys, :], is_whole)
        new = jnp.maximum(highest, logits.max(axis=1))
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(logits - new[:, None])
        total = total * shrink[:, None] + _product(weights.astype(value.dtype), value)
        return total, new, weight * shrink + weights.sum(axis=1)

    zeros = jnp.zeros(block.q, jnp.float32)
    carry = jnp.zeros(query.shape, jnp.float32), zeros + MASKED, zeros
    total, highest, weight = _visit_all(rules, ("left", "right"), ranges_ref, i, near, visit, carry)
    is_seen = highest > 0.5 * MASKED
    weight = jnp.where(is_seen, weight, 1.0)
    out_ref[...] = jnp.where(is_seen[:, None], total / weight[:, None], 0.0).astype(out_ref.dtype)
    lse_ref[...] = grid.stored(jnp.where(is_seen, highest + jnp.log2(weight), UNSEEN))


def query_gradient_kernel(
    query_ref, key_ref, value_ref, tiles_ref, far_ref, q_codes_ref, k_codes_ref, ranges_ref, out_ref, lse_ref,
    gradient_ref, d_query_ref, delta_ref, d_far_ref, d_tiles_ref, *, rules: MaskRules, block: Block, bias_block: Block,
    grid: Grid,
):  # fmt: skip
    """Compute the gradient of one block of queries of one head, delta, and the sums of the far logits' gradients.

    Far blocks are those that `bias_gradient_kernel`, whose block is `bias_block`, skips. With `d_tiles_ref`, the
    gradients of the near blocks are summed here; the same `block` and `bias_block` are needed, and a sequential grid.
    """
    i = pl.program_id(grid.block)
    if d_tiles_ref is not None:

        @pl.when((i == 0) & (pl.program_id(grid.batch) == 0))
        def _():
            d_tiles_ref[...] = jnp.zeros(d_tiles_ref.shape, d_tiles_ref.dtype)

    query, gradient, lse = query_ref[...], gradient_ref[...], grid.loaded(lse_ref[...])
    delta = (out_ref[...].astype(jnp.float32) * gradient.astype(jnp.float32)).sum(axis=1)
    delta_ref[...] = grid.stored(delta)
    codes = (lambda _, k: (q_codes_ref[...], k_codes_ref[pl.ds(k, block.k)])) if rules.coded else None
    logits_of = _Logits(rules, block, tiles_ref, far_ref, codes, grid)
    near = None if rules.reach is None else rules.tiles(block).near_keys(i)
    if near is not None:
        tile = i if bias_block.q == block.q else lax.div(i, bias_block.q // block.q)
        tiles_begin, tiles_end = (n * (bias_block.k // block.k) for n in rules.tiles(bias_block).near_keys(tile))

    def visit(kind, is_whole, j, carry):
        d_query, left, right = carry
        keys = pl.ds(j * block.k, block.k)
        key = key_ref[keys, :]
        logits, slope = logits_of(kind, i, j, query, key, is_whole)
        d_weights = _product_transposed(gradient, value_ref[keys, :])
        d_logits = jnp.exp2(logits - lse[:, None]) * (d_weights - delta[:, None])
        if kind == "left":
            left += jnp.where(j < tiles_begin, d_logits.sum(axis=1), 0.0)
        elif kind == "right":
            right += jnp.where(j >= tiles_end, d_logits.sum(axis=1), 0.0)
        elif d_tiles_ref is not None:
            d_tiles_ref[rules.tiles(block).number(i, j)] += d_logits
        d_product = d_logits if slope is None else d_logits * slope
        return d_query + _product(d_product.astype(key.dtype), key), left, right

    zeros = jnp.zeros(block.q, jnp.float32)
    carry = jnp.zeros(query.shape, jnp.float32), zeros, zeros
    d_query, left, right = _visit_all(rules, ("left", "right"), ranges_ref, i, near, visit, carry)
    d_query_ref[...] = d_query.astype(d_query_ref.dtype)
    if d_far_ref is not None:
        d_far_ref[0, :] = grid.stored(left)
        d_far_ref[1, :] = grid.stored(right)


def key_gradient_kernel(
    query_ref, key_ref, value_ref, tiles_ref, far_ref, q_codes_ref, k_codes_ref, ranges_ref, lse_ref, delta_ref,
    gradient_ref, d_key_ref, d_value_ref, *, rules: MaskRules, block: Block, grid: Grid, groups: int,
):  # fmt: skip
    """Compute the gradients of one block of keys and values over the `groups` query heads that share it, transposed."""
    j = pl.program_id(grid.block)
    key, value = key_ref[...], value_ref[...]
    near = None if rules.reach is None else rules.tiles(block).near_queries(j)
    codes = (lambda q, _: (q_codes_ref[pl.ds(q, block.q)], k_codes_ref[...])) if rules.coded else None

    def head(g, carry):
        logits_of = _Logits(rules, block, tiles_ref, far_ref, codes, grid, head=(g,), transposed=True)

        def visit(kind, is_whole, i, carry):
            d_key, d_value = carry
            queries = pl.ds(i * block.q, block.q)
            index = (g, queries) if grid.on_tpu else (queries, g)
            query, gradient = query_ref[*index, :], gradient_ref[*index, :]
            logits, slope = logits_of(kind, i, j, query, key, is_whole)
            weights = jnp.exp2(logits - lse_ref[g, queries][None, :])
            d_value += _product(weights.astype(gradient.dtype), gradient)
            d_weights = _product_transposed(value, gradient)
            d_logits = weights * (d_weights - delta_ref[g, queries][None, :])
            d_product = d_logits if slope is None else d_logits * slope
            return d_key + _product(d_product.astype(query.dtype), query), d_value

        return _visit_all(rules, ("right", "left"), ranges_ref, j, near, visit, carry)

    carry = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    carry = head(0, carry) if groups == 1 else lax.fori_loop(0, groups, head, carry)
    d_key_ref[...] = carry[0].astype(d_key_ref.dtype)
    d_value_ref[...] = carry[1].astype(d_value_ref.dtype)


def bias_gradient_kernel(
    query_ref, key_ref, value_ref, tiles_ref, q_codes_ref, k_codes_ref, visits_ref, counts_ref, lse_ref, delta_ref,
    gradient_ref, d_tile_ref, *, rules: MaskRules, block: Block, grid: Grid, blocks: int,
):  # fmt: skip
    """Sum the gradient of one tile of one head over a share of the blocks of queries that use it (`blocks` per row)."""
    tile, part, parts = pl.program_id(0), pl.program_id(2), pl.num_programs(2)

    def visit(is_whole, n, d_tile):
        visited = visits_ref[tile, n]
        row = lax.div(visited, blocks)
        i = visited - row * blocks
        j = tile + rules.tiles(block).first + i * (block.q // block.k)
        queries, keys = pl.ds(i * block.q, block.q), pl.ds(j * block.k, block.k)
        codes = (lambda *_: (q_codes_ref[row, queries], k_codes_ref[row, keys])) if rules.coded else None
        logits_of = _Logits(rules, block, tiles_ref, None, codes, grid)
        logits, _ = logits_of("near", i, j, query_ref[row, queries, :], key_ref[row, keys, :], is_whole)
        d_weights = _product_transposed(gradient_ref[row, queries, :], value_ref[row, keys, :])
        weights = jnp.exp2(logits - lse_ref[row, queries][:, None])
        return d_tile + weights * (d_weights - delta_ref[row, queries][:, None])

    d_tile = jnp.zeros((block.q, block.k), jnp.float32)
    for n, is_whole in enumerate((True, False) if rules.masks else (True,)):
        first, last = counts_ref[n, tile], counts_ref[n + 1, tile]
        share = pl.cdiv(last - first, parts)
        begin = jnp.minimum(first + part * share, last)
        end = jnp.minimum(begin + share, last)
        d_tile = lax.fori_loop(begin, end, functools.partial(visit, is_whole), d_tile)
    d_tile_ref[...] = d_tile
