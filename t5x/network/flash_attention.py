"""Fused attention for GPUs: T5's bias table and its gradient, packed rows, any length, no [q, k] array.

Every sum has a fixed order, so results are bitwise reproducible. Blocks of queries and keys that do not see each other
are skipped: packed rows cost less than full ones.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from t5x.network import flash_hopper as hopper
from t5x.network import flash_kernels as kernels
from t5x.network.flash_kernels import Block, Tiles
from t5x.network.flash_preparation import (
    Blocks,
    Plan,
    PreparedBias,
    PreparedMask,
    make_plan,
    prepare_bias,
    prepare_mask,
)
from t5x.network.relative_position import RelativeBias

if TYPE_CHECKING:
    from t5x.network.attention import Mask

_BIAS_PROGRAMS = 1024  # programs of the bias gradient's kernel, enough to fill a GPU


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: "Mask",
    bias: RelativeBias | None = None,
    *,
    softcap: float | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute softmax(q·k + bias, where the mask allows) v, differentiable in query, key, value and the bias table.

    Args:
      query: [batch, q, heads, head_dim], bfloat16 or float16.
      key, value: [batch, k, key heads, head_dim]; the number of key heads divides that of the heads.
      mask, bias: prepared for this attention (`attention.prepare`), or prepared here. A bias of None adds nothing.
      softcap: logits become `softcap * tanh(logits / softcap)` before the bias is added.
      blocks: the block of each kernel; None chooses them by the shapes.
      interpret: run in Pallas's interpreter, on any device but slowly, for tests.

    Returns:
      [batch, q, heads, head_dim] in the dtype of `value`; 0 for a query that sees no key.
    """
    lengths, head_dim = (query.shape[1], key.shape[1]), query.shape[3]
    plan = make_plan(lengths, head_dim, mask, bias, softcap=softcap, blocks=blocks, interpret=interpret)
    of_mask = mask.prepared
    if of_mask is None or not of_mask.fits(plan, query.shape[0]):
        of_mask = prepare_mask(mask, query.shape[0], lengths, plan)
    of_bias = gradient_of = None
    if bias is not None:
        of_bias = bias.prepared
        if of_bias is None or of_bias.plan != plan:
            of_bias = prepare_bias(bias, plan)
        gradient_of = of_bias.near, of_bias.far
        of_bias = of_bias.replace(near=None, far=None)
    q_pad, k_pad = (padded - length for padded, length in zip(plan.lengths, lengths, strict=True))
    width_pad = pl.next_power_of_2(max(head_dim, 16)) - head_dim
    padded = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, width_pad))) if more or width_pad else x
    out = _attention(
        padded(query, q_pad), padded(key, k_pad), padded(value, k_pad).astype(query.dtype), gradient_of,
        of_bias, of_mask, plan,
    )  # fmt: skip
    return out[:, : lengths[0], :, :head_dim].astype(value.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(query, key, value, gradient_of, bias, mask, plan):
    """Compute attention for padded arrays. The bias's gradient is that of `gradient_of`, its `near` and `far`."""
    del gradient_of
    return _forward(query, key, value, bias, mask, plan)[0]


def _attention_forward(query, key, value, gradient_of, bias, mask, plan):
    del gradient_of
    out, lse = _forward(query, key, value, bias, mask, plan)
    return out, (query, key, value, bias, mask, out, lse)


def _attention_backward(plan, residuals, gradient):
    return (*_backward(*residuals, gradient, plan), None, None)


_attention.defvjp(_attention_forward, _attention_backward)


# Jitted separately so that layers with the same shapes share their kernels, which take seconds to compile.


@functools.partial(jax.jit, static_argnames="plan")
def _forward(
    query, key, value, bias: PreparedBias | None, mask: PreparedMask, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Return the result and the base-2 log-sum-exp of the logits, float32 [batch, heads, q]."""
    call = _Call(query, key, bias, mask, plan, "forward")
    if plan.is_hopper:
        strip, _, *codes_and_ranges = call.shared()
        return hopper.forward(query, key, value, strip, *codes_and_ranges, plan.rules)
    return call(
        functools.partial(kernels.forward_kernel, rules=plan.rules, block=call.block),
        (call.q_block(), call.k_row(), call.k_row(), *call.shared_specs()),
        (query, key, value, *call.shared()),
        (call.q_block(), call.q_vector()),
        (_like(query), jax.ShapeDtypeStruct(call.vector_shape, jnp.float32)),
    )


@functools.partial(jax.jit, static_argnames="plan")
def _backward(query, key, value, bias: PreparedBias | None, mask: PreparedMask, out, lse, gradient, plan: Plan):
    """Return the gradients of query, key and value, and those of `near` and `far`."""
    arrays = query, key, value, bias, mask
    d_query, delta, d_far = _query_gradient(*arrays, out, lse, gradient, plan)
    d_key, d_value = _key_gradient(*arrays, lse, delta, gradient, plan)
    if bias is None:
        return d_query, d_key, d_value, None
    d_near = _near_gradient(*arrays, lse, delta, gradient, plan)
    return d_query, d_key, d_value, (d_near, d_far.sum((0, 3)))


def _query_gradient(query, key, value, bias, mask, out, lse, gradient, plan: Plan):
    """Return the gradient of query, delta [batch, heads, q], and that of far logits [batch, heads, 2, q] or None."""
    call = _Call(query, key, bias, mask, plan, "query")
    block = call.block
    far = far_shape = None
    if bias is not None:
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


def _key_gradient(query, key, value, bias, mask, lse, delta, gradient, plan: Plan):
    """Return the gradients of key and value."""
    call = _Call(query, key, bias, mask, plan, "key")
    return call(
        functools.partial(kernels.key_gradient_kernel, rules=plan.rules, block=call.block, groups=call.groups),
        (call.q_row(), call.k_block(), call.k_block(), *call.shared_specs(), call.q_vectors(), call.q_vectors(),
         call.q_row()),
        (query, key, value, *call.shared(), lse, delta, gradient),
        (call.k_block(), call.k_block()),
        (_like(key), _like(value)),
    )  # fmt: skip


def _near_gradient(query, key, value, bias, mask, lse, delta, gradient, plan: Plan) -> jax.Array:
    """Return the gradient of `near`."""
    batch, q_length, heads, width = query.shape
    call = _Call(query, key, bias, mask, plan, "bias")
    block, tiles, made = call.block, Tiles(call.block, plan.rules.reach), bias.tiles.bias
    visits, ends, q_codes, k_codes = mask.visits, mask.ends, mask.q_codes, mask.k_codes
    parts = max(1, min(visits.shape[1], _BIAS_PROGRAMS // (heads * tiles.count)))
    whole = lambda array: None if array is None else pl.BlockSpec(array.shape, lambda t, h, p: (0,) * array.ndim)
    rows = lambda array, group: pl.BlockSpec(
        (batch, array.shape[1], None, width), lambda t, h, p: (0, 0, jax.lax.div(h, group), 0)
    )
    vector = pl.BlockSpec((batch, None, q_length), lambda t, h, p: (0, h, 0))
    sums = pl.pallas_call(
        functools.partial(kernels.bias_gradient_kernel, rules=plan.rules, block=block, blocks=q_length // block.q),
        grid=(tiles.count, heads, parts),
        in_specs=(
            rows(query, 1), rows(key, call.groups), rows(value, call.groups),
            pl.BlockSpec((None, *made.shape[1:]), lambda t, h, p: (h, 0, 0, 0)),
            whole(q_codes), whole(k_codes), whole(visits),
            pl.BlockSpec((None, *ends.shape[1:]), lambda t, h, p: (0, 0, 0)), vector, vector, rows(gradient, 1),
        ),
        out_specs=pl.BlockSpec((None, None, None, block.q, block.k), lambda t, h, p: (p, h, t, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((parts, heads, tiles.count, block.q, block.k), jnp.float32),
        interpret=plan.interpret,
        compiler_params=call.compiler_params,
    )(query, key, value, made, q_codes, k_codes, visits, ends, lse, delta, gradient)  # fmt: skip
    return _sum_diagonals(sums.sum(0))


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

    def __init__(self, query, key, bias: PreparedBias | None, mask: PreparedMask, plan: Plan, kernel: str):
        self.plan, self.bias, self.mask, self.kernel = plan, bias, mask, kernel
        self.block: Block = getattr(plan.blocks, kernel)
        self.of_keys = kernel == "key"
        self.ranges = getattr(mask.ranges, kernel)
        self.batch, self.q_length, heads, self.width = query.shape
        self.k_length, self.k_heads = key.shape[1:3]
        self.groups = heads // self.k_heads
        self.heads = self.k_heads if self.of_keys else heads
        self.vector_shape = (self.batch, heads, self.q_length)
        self.compiler_params = triton.CompilerParams(num_warps=self.block.warps, num_stages=self.block.stages)

    def __call__(self, kernel, in_specs, arrays, out_specs, out_shape) -> Any:
        blocks = self.k_length // self.block.k if self.of_keys else self.q_length // self.block.q
        return pl.pallas_call(
            kernel, grid=(blocks, self.batch, self.heads), in_specs=in_specs, out_specs=out_specs,
            out_shape=out_shape, interpret=self.plan.interpret, compiler_params=self.compiler_params,
        )(*arrays)  # fmt: skip

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
