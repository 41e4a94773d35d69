"""Attention with the mask and the position bias in compact form instead of as arrays.

`attend` dispatches to one of several backends. `pallas` (ours) and `cudnn` never form a [batch, heads, q, k] array;
`xla`, the reference, does.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x.errors import UserError
from t5x.network.attention_choice import REFUSES, fastest, log_choice
from t5x.network.keys import Keys
from t5x.network.relative_position import Preparable, RelativeBias
from t5x.partitioning.devices import platform, runs_triton
from t5x.partitioning.logical import constrain, on_each_device

MASKED = -1e10

# Logical axes of queries, caches, and what every row of a batch has.
_QUERIES, _CACHE, _ROWS = ("batch", "length", "heads", "kv"), ("batch", "heads", "length", "kv"), ("batch", "length")

_by_reference = contextvars.ContextVar("by_reference", default=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask(Preparable):
    """Which keys a query may attend to.

    Attributes:
      key_segments: int [batch, k]; 0 is padding and is never attended to. None: every key is real. cuDNN requires
        padding to be at the end of rows; otherwise its result is NaN.
      query_segments: int [batch, q] for packed rows: a query sees only keys of its own segment.
      position: traced position of the single query of an incremental decoding step, a scalar or [batch]; later keys
        are hidden.
      prefix: int [batch, k], for a causal mask: where it is 1 for both query and key, they see each other in both
        directions.
      causal: query i sees keys 0..i.
      window: query i sees keys at distances below this, on both sides.
      row_offsets: int32 [batch, k], in a beam search: the cached keys and values of row i before its position are those
        of row i + row_offsets[i, k].
      prepared: see `prepare`.
    """

    key_segments: jax.Array | None = None
    query_segments: jax.Array | None = None
    position: jax.Array | None = None
    prefix: jax.Array | None = None
    row_offsets: jax.Array | None = None
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    prepared: Any = None

    def allowed(self, q_length: int, k_length: int) -> jax.Array | None:
        """Return a bool mask broadcastable to [batch, heads, q, k]; None if everything is allowed."""
        parts = []
        if self.causal:
            causal = (jnp.arange(q_length)[:, None] >= jnp.arange(k_length)[None, :])[None, None]
            if self.prefix is not None:
                inside = self.prefix > 0
                causal |= (inside[:, :, None] & inside[:, None, :])[:, None]
            parts.append(causal)
        if self.window is not None:
            distance = jnp.arange(k_length)[None, :] - jnp.arange(q_length)[:, None]
            parts.append((jnp.abs(distance) < self.window)[None, None])
        if self.position is not None:
            parts.append((jnp.arange(k_length) <= self.position[..., None])[..., None, None, :])
        if self.key_segments is not None:
            parts.append((self.key_segments > 0)[:, None, None, :])
            if self.query_segments is not None:
                parts.append((self.query_segments[:, :, None] == self.key_segments[:, None, :])[:, None])
        allowed = None
        for part in parts:
            allowed = part if allowed is None else allowed & part
        return allowed


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask,
    bias: RelativeBias | None = None,
    keys: Keys | None = None,
    dropout_rate: float = 0.0,
    float32_logits: bool = False,
    softcap: float | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Return softmax(q·k + bias, where the mask allows) v. As in T5, there is no 1/sqrt(head_dim).

    Args:
      query: [batch, q, heads, head_dim].
      key, value: [batch, k, key heads, head_dim]; the number of key heads divides that of the heads.
      keys, dropout_rate: T5 drops the same attention weights for every query of an example, which is equivalent to
        dropping rows of `value`. That is done here, before any backend runs.
      float32_logits: multiply queries and keys in float32.
      softcap: q·k becomes `softcap * tanh(q·k / softcap)` before the bias is added.
      backend: `auto` or the name of a backend.

    Returns:
      [batch, q, heads, head_dim] in the dtype of `value`.
    """
    if keys is not None and keys.dropout is not None and dropout_rate > 0.0:
        keep = keys.keep((value.shape[1], value.shape[2], 1), dropout_rate)
        value = jnp.where(keep, value / (1.0 - dropout_rate), 0).astype(value.dtype)
    if key.shape[1] == 1 and value.shape[2] == query.shape[2]:  # the softmax of one logit is 1
        return jnp.broadcast_to(value, (*query.shape[:3], value.shape[-1]))
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    capped = {} if softcap is None else {"softcap": softcap}
    return BACKENDS[_choose(query, key, mask, softcap, backend)](query, key, value, mask, bias, **capped)


def _choose(query: Any, key: Any, mask: Mask, softcap: float | None, backend: str) -> str:
    """Return the name of the backend for queries and keys of these shapes and dtypes."""
    if _by_reference.get():
        return "xla"
    name = backend
    if backend == "auto":
        name = fastest(query, key, mask, softcap)
        log_choice(name, query, mask)
    if name not in BACKENDS:
        raise UserError(f"attention_backend is {backend!r}; known are auto, {', '.join(BACKENDS)}.")
    if name in REFUSES and (reason := REFUSES[name](query, key, mask, softcap)):
        raise UserError(f"attention_backend is {name!r}, but {reason}: set it to 'auto' or 'xla'.")
    return name


def prepare(
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    mask: Mask,
    bias: RelativeBias | None,
    backend: str = "auto",
) -> tuple[Mask, RelativeBias | None]:
    """Return the mask and the bias with what every `attend` of queries and keys like these would derive from them.

    A tower does this once for all its layers, because XLA compiles everything that layers repeat again. Layers may use
    another mask, bias or backend nevertheless: `attend` uses only what was prepared for it.

    Args:
      query, key: shape [batch, length, heads, head_dim] and dtype of the queries and keys.
    """
    if min(query.shape[1], key.shape[1]) == 1 or _choose(query, key, mask, None, backend) != "pallas":
        return mask, bias
    from t5x.network import flash_preparation as flash  # Pallas is slow to import

    lengths = query.shape[1], key.shape[1]
    plan = flash.make_plan(lengths, query.shape[3], mask, bias, interpret=platform() == "cpu")

    def compute(rows, mask, bias):
        of_mask = flash.prepare_mask(mask, rows.shape[0], lengths, plan)
        return [of_mask, None if bias is None else flash.prepare_bias(bias, plan)]

    rows = np.zeros((query.shape[0], 0), bool)  # a device prepares for its part of the batch, even without segments
    of_mask, of_bias = on_each_device(
        compute, (("batch", None), _mask_axes(mask), _bias_axes(bias, "heads")),
        [flash.PreparedMask.axes(plan), None if bias is None else flash.PreparedBias.axes(plan, "heads")],
        rows, mask, bias,
    )  # fmt: skip
    return mask.replace(prepared=of_mask), None if bias is None else bias.replace(prepared=of_bias)


def _mask_axes(mask: Mask) -> Mask:
    """Return the logical axes of every array of a mask."""
    prepared = mask.prepared and mask.prepared.axes(mask.prepared.plan)
    return mask.replace(
        key_segments=_ROWS, query_segments=_ROWS, prefix=_ROWS, row_offsets=_ROWS, position=(), prepared=prepared
    )


def _bias_axes(bias: RelativeBias | None, heads: str | None) -> RelativeBias | None:
    """Return the logical axes of every array of a bias."""
    if bias is None:
        return None
    prepared = bias.prepared and bias.prepared.axes(bias.prepared.plan, heads)
    return bias.replace(table=(heads, None), prepared=prepared)


@contextlib.contextmanager
def by_reference() -> Iterator[None]:
    """Compute all attention traced inside the block with the reference backend, whatever backend is configured.

    Functions that JAX has already compiled (a user's layer under `nn.jit`) are not traced again.
    """
    token = _by_reference.set(True)
    try:
        yield
    finally:
        _by_reference.reset(token)


def attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask,
    bias: RelativeBias | None = None,
    float32_logits: bool = False,
) -> jax.Array:
    """Compute `attend` for a decoding step, with keys and values as [batch, heads, k, head_dim].

    In this layout, as the caches store it, the data of one head and row is contiguous. With the layout of `attend`,
    every step of a decoding loop would first transpose the entire cache.
    """
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    if mask.position is None and bias is None and has_step_kernel(query.shape[1], query.dtype, key):
        from t5x.network.decode_kernel import attend_step

        compute = functools.partial(attend_step, interpret=platform() == "cpu")
        return on_each_device(
            compute, (_QUERIES, _CACHE, _CACHE, _ROWS), _QUERIES, query, key, value, mask.key_segments
        )  # fmt: skip
    if mask.row_offsets is not None:
        key, value = (_rows_of_beams(x, mask) for x in (key, value))
    if platform() == "cpu":  # the larger operand on the left, as in `layers.few_rows`
        logits = jnp.einsum("bhkd,bqhd->bhkq", key, query, preferred_element_type=jnp.float32)
        logits = jnp.swapaxes(jax.lax.optimization_barrier(logits), 2, 3)
    else:
        logits = jnp.einsum("bqhd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    weights = _weights(logits, mask, bias).astype(value.dtype)
    return jnp.einsum("bhqk,bhkd->bqhd", weights, value)


def has_step_kernel(queries: int, dtype: Any, cache: jax.Array) -> bool:
    """Return whether our kernel computes a decoding step with this cache [batch, heads, k, head_dim]."""
    if not runs_triton():
        return False
    from t5x.network import decode_kernel  # Pallas is slow to import

    return decode_kernel.fits(queries, dtype, cache)


def extend_and_attend(
    new: jax.Array, key: jax.Array, value: jax.Array, *, mask: Mask, bias: RelativeBias | None = None
) -> list[jax.Array]:
    """Write the key and value of a step at the mask's position, and attend up to there; see `has_step_kernel`.

    Args:
      new: [batch, 3, heads, head_dim]: query, key and value.
      key, value: caches, [batch, heads, k, head_dim].

    Returns:
      [batch, heads, head_dim], and both caches.
    """
    from t5x.network import decode_kernel

    assert mask.position is not None, "a decoding step has a position"
    row = None if bias is None else bias.row(mask.position, key.shape[2])[..., 0, :]
    position, bias_row = ((), ("heads", None)) if mask.position.ndim == 0 else (("batch",), ("batch", "heads", None))

    def compute(*arguments):
        return list(decode_kernel.extend_and_attend(*arguments, interpret=platform() == "cpu"))

    return on_each_device(
        compute, (("batch", None, "heads", "kv"), _CACHE, _CACHE, position, bias_row, _ROWS),
        [("batch", "heads", "kv"), _CACHE, _CACHE], new, key, value, mask.position, row, mask.row_offsets,
    )  # fmt: skip


def _rows_of_beams(cache: jax.Array, mask: Mask) -> jax.Array:
    """Gather a cache [batch, heads, k, head_dim] by the mask's `row_offsets`."""
    assert mask.position is not None and mask.row_offsets is not None, "a beam search sets both"
    numbers = jnp.arange(cache.shape[2])
    offsets = jnp.where(numbers < mask.position, mask.row_offsets, 0)
    at = jnp.arange(cache.shape[0])[:, None] + offsets
    return jnp.swapaxes(cache[at, :, numbers], 1, 2)


def attend_xla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    bias: RelativeBias | None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute the reference attention: plain matmuls, softmax in float32."""
    if query.shape[2] != key.shape[2]:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    weights = _weights(logits, mask, bias).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def attend_pallas(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    bias: RelativeBias | None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute attention with our fused kernel, each device for its own rows and heads."""
    from t5x.network.flash_attention import flash_attention  # Pallas is slow to import

    heads = "heads" if key.shape[2] == query.shape[2] else None
    layout = ("batch", "length", heads, "kv")
    compute = functools.partial(flash_attention, softcap=softcap, interpret=platform() == "cpu")
    return on_each_device(
        compute, (layout, layout, layout, _mask_axes(mask), _bias_axes(bias, heads)), layout,
        query, key, value, mask, bias,
    )  # fmt: skip


def attend_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask, bias: RelativeBias | None
) -> jax.Array:
    """Compute cuDNN's fused attention, with the learned bias and its gradient; padding is given as lengths."""
    q_length, k_length = query.shape[1], key.shape[1]
    lengths = None
    if mask.key_segments is not None:
        is_real = mask.key_segments > 0
        # A row without keys only fills up the batch. It must not become NaN, so it sees its first key.
        lengths = jnp.maximum(jnp.sum(is_real, axis=1, dtype=jnp.int32), 1)
    q_more, k_more = q_length % 2, k_length % 2  # cuDNN accepts only even lengths
    if k_more and lengths is None:
        lengths = jnp.full(key.shape[:1], k_length, jnp.int32)
    matrix = None
    if bias is not None:
        matrix = bias.matrix(q_length + q_more, k_length + k_more)
        if mask.key_segments is not None:
            matrix += jnp.where(jnp.all(is_real[:, 1:] <= is_real[:, :-1]), 0.0, jnp.nan)
        matrix = _divided_by_heads(matrix.astype(query.dtype)[None])
    longer = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) if more else x
    parts = longer(query, q_more), longer(key, k_more), longer(value, k_more).astype(query.dtype)
    fused = _fused_without_bias if matrix is None else functools.partial(_fused, matrix)
    return fused(*parts, lengths, mask.causal)[:, :q_length].astype(value.dtype)


def _divided_by_heads(bias: jax.Array) -> jax.Array:
    """Shard a bias [1, heads, q, k] over the devices like the queries, which JAX does not do by itself."""
    return constrain(bias, None, "heads", None, None)


def _fused(
    bias: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None, causal: bool
) -> jax.Array:
    return jax.nn.dot_product_attention(
        query, key, value, bias=bias, scale=1.0, is_causal=causal, key_value_seq_lengths=lengths,
        implementation="cudnn",
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused_without_bias(query, key, value, lengths, causal):
    return _fused(None, query, key, value, lengths, causal)


def _fused_without_bias_forward(query, key, value, lengths, causal):
    # Without a bias, cuDNN accumulates the gradient of the queries in no fixed order: runs would not be reproducible.
    nothing = _divided_by_heads(jnp.zeros((1, query.shape[2], query.shape[1], key.shape[1]), query.dtype))
    return jax.vjp(lambda q, k, v: _fused(nothing, q, k, v, lengths, causal), query, key, value)


def _fused_without_bias_backward(causal, backward, gradient):
    del causal
    return (*backward(gradient), None)


_fused_without_bias.defvjp(_fused_without_bias_forward, _fused_without_bias_backward)


def attend_folded(
    query: jax.Array,
    source: jax.Array,
    key_kernel: jax.Array,
    value_kernel: jax.Array,
    *,
    mask: Mask,
    keys: Keys | None = None,
    dropout_rate: float = 0.0,
    float32_logits: bool = False,
) -> jax.Array:
    """Compute `attend` for few queries without materializing the keys and values.

    The keys are `source @ key_kernel`, the values `source @ value_kernel`. q·(e W_k) equals (q W_k')·e: with one query
    per row, applying the kernels to the query is almost free, while keys and values of all positions would cost a sixth
    of the encoder.

    Args:
      query: [batch, q, heads, head_dim].
      source: [batch, k, emb].
      key_kernel, value_kernel: [emb, heads * head_dim].
    """
    heads, head_dim = query.shape[2:]
    key_kernel, value_kernel = (k.reshape(-1, heads, head_dim) for k in (key_kernel, value_kernel))
    seen = source
    if float32_logits:
        query, key_kernel, seen = (x.astype(jnp.float32) for x in (query, key_kernel, source))
    folded = jnp.einsum("bqhd,ehd->bqhe", query, key_kernel)
    weights = _weights(
        jnp.einsum("bqhe,bke->bhqk", folded, seen, preferred_element_type=jnp.float32), mask, bias=None
    )  # fmt: skip
    if keys is not None and keys.dropout is not None and dropout_rate > 0.0:
        keep = keys.keep((source.shape[1], heads, 1), dropout_rate).transpose(0, 2, 3, 1)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0)
    context = jnp.einsum("bhqk,bke->bqhe", weights.astype(source.dtype), source)
    return jnp.einsum("bqhe,ehd->bqhd", context, value_kernel)


def _weights(logits: jax.Array, mask: Mask, bias: RelativeBias | None) -> jax.Array:
    """Return the attention weights for the raw logits q·k [batch, heads, q, k]."""
    q_length, k_length = logits.shape[2:]
    if bias is not None:
        at = bias.matrix(q_length, k_length) if mask.position is None else bias.row(mask.position, k_length)
        logits += at
    if (allowed := mask.allowed(q_length, k_length)) is not None:
        logits = jnp.where(allowed, logits, MASKED)
    return jax.nn.softmax(logits, axis=-1)


Backend = Callable[..., jax.Array]  # query, key, value, mask, bias; optionally softcap
BACKENDS: dict[str, Backend] = {"xla": attend_xla, "cudnn": attend_cudnn, "pallas": attend_pallas}
