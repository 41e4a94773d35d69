"""Attention over structure: who may attend to whom, and the position bias, are described, not written out.

`attend` is the one door. A back end behind it may avoid ever forming a [batch, heads, q, k] array; `xla` is the
reference and does form it.
"""

import logging
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from t5x.errors import UserError
from t5x.network.keys import Keys
from t5x.network.relative_position import RelativeBias

MASKED = -1e10

log = logging.getLogger(__name__)


@flax.struct.dataclass
class Mask:
    """Which keys a query may attend to.

    Attributes:
      key_segments: int [batch, k]; 0 is padding and is never attended to. None: every key is real.
      query_segments: int [batch, q] for packed rows: a query sees only keys of its own segment.
      position: traced position of the single query of an incremental decoding step, one for all rows or [batch]; keys
        after it are hidden.
      prefix: int [batch, k], of a causal mask; where it is 1 for query and key, they see each other whatever the order.
      causal: query i sees keys 0..i.
    """

    key_segments: jax.Array | None = None
    query_segments: jax.Array | None = None
    position: jax.Array | None = None
    prefix: jax.Array | None = None
    causal: bool = flax.struct.field(pytree_node=False, default=False)

    def allowed(self, q_length: int, k_length: int) -> jax.Array | None:
        """bool, broadcastable to [batch, heads, q, k]; None where everything is allowed."""
        parts = []
        if self.causal:
            causal = (jnp.arange(q_length)[:, None] >= jnp.arange(k_length)[None, :])[None, None]
            if self.prefix is not None:
                inside = self.prefix > 0
                causal |= (inside[:, :, None] & inside[:, None, :])[:, None]
            parts.append(causal)
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
    backend: str = "auto",
) -> jax.Array:
    """softmax(q·k + bias, where the mask allows) v, without T5's missing 1/sqrt(head_dim).

    Args:
      query: [batch, q, heads, head_dim].
      key, value: [batch, k, heads, head_dim].
      keys, dropout_rate: T5 drops the same attention weights for every query of an example, which is the same as
        dropping rows of `value`; it is done there, before any back end.
      float32_logits: multiply queries and keys in float32.
      backend: `auto` or the name of a back end.

    Returns:
      [batch, q, heads, head_dim] in the dtype of `value`.
    """
    if keys is not None and keys.dropout is not None and dropout_rate > 0.0:
        keep = keys.keep((value.shape[1], value.shape[2], 1), dropout_rate)
        value = jnp.where(keep, value / (1.0 - dropout_rate), 0).astype(value.dtype)
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    name = "xla" if backend == "auto" else backend
    if name not in BACKENDS:
        raise UserError(f"attention_backend is {backend!r}; known are auto, {', '.join(BACKENDS)}.")
    return BACKENDS[name](query, key, value, mask, bias)


def attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask,
    bias: RelativeBias | None = None,
    float32_logits: bool = False,
) -> jax.Array:
    """`attend` of a decoding step: few queries, and keys and values [batch, heads, k, head_dim] as caches hold them.

    In that order a product reads what one head of one row needs from one place; in `attend`'s, every step of a decoding
    loop would transpose the whole cache first.
    """
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    if jax.default_backend() == "cpu":  # the larger one from the left, as in `layers.few_rows`
        logits = jnp.einsum("bhkd,bqhd->bhkq", key, query, preferred_element_type=jnp.float32)
        logits = jnp.swapaxes(jax.lax.optimization_barrier(logits), 2, 3)
    else:
        logits = jnp.einsum("bqhd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    weights = _weights(logits, mask, bias).astype(value.dtype)
    return jnp.einsum("bhqk,bhkd->bqhd", weights, value)


def attend_xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask, bias: RelativeBias | None) -> jax.Array:
    """The reference: plain products, softmax in float32."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    weights = _weights(logits, mask, bias).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _weights(logits: jax.Array, mask: Mask, bias: RelativeBias | None) -> jax.Array:
    """Of products [batch, heads, q, k]."""
    q_length, k_length = logits.shape[2:]
    if bias is not None:
        at = bias.matrix(q_length, k_length) if mask.position is None else bias.row(mask.position, k_length)
        logits += at
    if (allowed := mask.allowed(q_length, k_length)) is not None:
        logits = jnp.where(allowed, logits, MASKED)
    return jax.nn.softmax(logits, axis=-1)


Backend = Callable[[jax.Array, jax.Array, jax.Array, Mask, RelativeBias | None], jax.Array]
BACKENDS: dict[str, Backend] = {"xla": attend_xla}
