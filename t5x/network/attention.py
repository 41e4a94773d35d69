"""Attention over structure: who may attend to whom, and the position bias, are described, not written out.

`attend` is the one door. A back end behind it may avoid ever forming a [batch, heads, q, k] array, as `cudnn` does;
`xla` is the reference and does form it.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator

import flax.struct
import jax
import jax.numpy as jnp

from t5x.errors import UserError
from t5x.network.keys import Keys
from t5x.network.relative_position import RelativeBias
from t5x.partitioning.logical import constrain

MASKED = -1e10

log = logging.getLogger(__name__)

_by_reference = contextvars.ContextVar("by_reference", default=False)


@flax.struct.dataclass
class Mask:
    """Which keys a query may attend to.

    Attributes:
      key_segments: int [batch, k]; 0 is padding and is never attended to. None: every key is real. A fused back end
        takes padding to be at the end of rows, as ours is; where it is not, the result is NaN.
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
    if key.shape[1] == 1:  # the softmax of one logit is 1
        return jnp.broadcast_to(value, (*query.shape[:3], value.shape[-1]))
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    if _by_reference.get():
        return attend_xla(query, key, value, mask, bias)
    name = _fastest(query, key, mask, bias) if backend == "auto" else backend
    if name not in BACKENDS:
        raise UserError(f"attention_backend is {backend!r}; known are auto, {', '.join(BACKENDS)}.")
    if name == "cudnn" and (reason := cudnn_refuses(query, key, mask, bias)):
        raise UserError(f"attention_backend is 'cudnn', but {reason}: set it to 'auto' or 'xla'.")
    return BACKENDS[name](query, key, value, mask, bias)


@contextlib.contextmanager
def by_reference() -> Iterator[None]:
    """What is traced inside computes attention by the reference, whatever back end it names.

    A function that JAX has compiled before, a user's layer under `nn.jit`, is not traced again.
    """
    token = _by_reference.set(True)
    try:
        yield
    finally:
        _by_reference.reset(token)


def _fastest(query: jax.Array, key: jax.Array, mask: Mask, bias: RelativeBias | None) -> str:
    """The quickest back end that is right here; says once which, and why."""
    if jax.default_backend() != "gpu" or query.shape[1] == 1:
        return "xla"
    reason = cudnn_refuses(query, key, mask, bias)
    _say(reason)
    return "xla" if reason else "cudnn"


@functools.cache
def _say(reason: str | None) -> None:
    if reason:
        log.warning("attention is several times slower than cuDNN's: XLA computes it, because %s", reason)
    else:
        log.info("attention: cuDNN")


def cudnn_refuses(query: jax.Array, key: jax.Array, mask: Mask, bias: RelativeBias | None) -> str | None:
    """Why cuDNN cannot compute this attention; None where it can."""
    if jax.default_backend() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version:
        return f"the device is {jax.devices()[0].device_kind}, no NVIDIA GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries and keys are {query.dtype.name} (cuDNN takes bfloat16 and float16)"
    if mask.query_segments is not None:
        return "rows are packed with several examples"
    if mask.prefix is not None:
        return "the mask has a prefix"
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        return f"head_dim is {query.shape[-1]} (cuDNN takes multiples of 8 up to 128)"
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if float(capability) < 8.0:
        return f"the GPU has compute capability {capability} (cuDNN's needs 8.0)"
    return None


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


def attend_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask, bias: RelativeBias | None
) -> jax.Array:
    """cuDNN's fused attention, with the learned bias and its gradient; padding by lengths."""
    q_length, k_length = query.shape[1], key.shape[1]
    lengths = None
    if mask.key_segments is not None:
        is_real = mask.key_segments > 0
        # A row without keys, which only fills a batch, must not become NaN: it sees its first.
        lengths = jnp.maximum(jnp.sum(is_real, axis=1, dtype=jnp.int32), 1)
    q_more, k_more = q_length % 2, k_length % 2  # cuDNN takes even lengths alone
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
    """[1, heads, q, k], laid over the devices as queries are; JAX would not see to it."""
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
    # Without a bias cuDNN adds up the gradient of the queries in no fixed order, and a run could not be repeated.
    nothing = _divided_by_heads(jnp.zeros((1, query.shape[2], query.shape[1], key.shape[1]), query.dtype))
    return jax.vjp(lambda *parts: _fused(nothing, *parts, lengths, causal), query, key, value)


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
    """`attend` of few queries to keys `source @ key_kernel` and values `source @ value_kernel`, which never exist.

    q·(e W_k) is (q W_k')·e: with one query a row, folding it through the kernels costs next to nothing, where keys and
    values of all positions would cost a sixth of what the encoder does.

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
    """Of products [batch, heads, q, k]."""
    q_length, k_length = logits.shape[2:]
    if bias is not None:
        at = bias.matrix(q_length, k_length) if mask.position is None else bias.row(mask.position, k_length)
        logits += at
    if (allowed := mask.allowed(q_length, k_length)) is not None:
        logits = jnp.where(allowed, logits, MASKED)
    return jax.nn.softmax(logits, axis=-1)


Backend = Callable[[jax.Array, jax.Array, jax.Array, Mask, RelativeBias | None], jax.Array]
BACKENDS: dict[str, Backend] = {"xla": attend_xla, "cudnn": attend_cudnn}
