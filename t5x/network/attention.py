"""Attention with the mask and the position bias in compact form instead of as arrays.

`attend` chooses one of several backends, `kernels.ops.BACKENDS`. `pallas` (ours) and `cudnn` never form a
[batch, heads, q, k] array; `xla`, the reference, does.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from t5x._runtime.errors import UserError
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops
from t5x.kernels.ops import BACKENDS
from t5x.network.keys import Keys, dropout

_by_reference = contextvars.ContextVar("by_reference", default=False)


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
    if keys is not None:
        value = dropout(value, dropout_rate, keys, shape=(*value.shape[1:3], 1))
    if key.shape[1] == 1 and value.shape[2] == query.shape[2]:  # the softmax of one logit is 1
        return jnp.broadcast_to(value, (*query.shape[:3], value.shape[-1]))
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    name = _choose(query, key, mask, softcap, backend)
    return ops().attend(name, query, key, value, mask, bias, softcap)


def _choose(query: Any, key: Any, mask: Mask, softcap: float | None, backend: str) -> str:
    """Return the name of the backend for queries and keys of these shapes and dtypes."""
    if _by_reference.get():
        return "xla"
    name, hardware_ops = backend, ops()
    if backend == "auto":
        name = hardware_ops.fastest(query, key, mask, softcap)
        hardware_ops.log_backend(name, query, mask)
    if name not in BACKENDS:
        raise UserError(f"attention_backend is {backend!r}; known are auto, {', '.join(BACKENDS)}.")
    if reason := hardware_ops.refuses(name, query, key, mask, softcap):
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
    if min(query.shape[1], key.shape[1]) == 1:
        return mask, bias
    return ops().prepare_attention(_choose(query, key, mask, None, backend), query, key, mask, bias)


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
    return ops().attend_cached(query, key, value, mask, bias)


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
    logits = jnp.einsum("bqhe,bke->bhqk", folded, seen, preferred_element_type=jnp.float32)
    weights = ops().attention_weights(logits, mask)
    if keys is not None and keys.dropout is not None and dropout_rate > 0.0:
        keep = keys.keep((source.shape[1], heads, 1), dropout_rate).transpose(0, 2, 3, 1)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0)
    context = jnp.einsum("bhqk,bke->bqhe", weights.astype(source.dtype), source)
    return jnp.einsum("bqhe,ehd->bqhd", context, value_kernel)
