"""The mask and T5's relative position bias of attention, in compact form instead of as [batch, heads, q, k] arrays."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Preparable:
    """A dataclass with a field `prepared`: what a backend of attention derived from the other fields, or None."""

    def replace(self, **updates: Any) -> Self:
        """Return a copy with these fields, and without `prepared`, which belongs to the old ones."""
        return dataclasses.replace(self, **{"prepared": None, **updates})


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
      prepared: see `Ops.prepare_attention`.
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


def segments_of(real: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return which example of its row a token belongs to, int [batch, length]; 0 is padding."""
    return real.astype(jnp.int32) if segment_ids is None else jnp.where(real, segment_ids, 0)


def bucket(distance: np.ndarray, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128) -> np.ndarray:
    """Return the bucket of each distance (key position minus query position).

    Half of the buckets (per direction) are single distances. The rest grow logarithmically up to `max_distance`, and
    all larger distances share the last one. Without `bidirectional`, keys after the query count as distance 0.
    """
    base = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        base = np.where(distance > 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    ratio = distance.astype(np.float32) / exact + np.finfo(np.float32).eps
    far = exact + (np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)).astype(np.int32)
    return (base + np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))).astype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias(Preparable):
    """A relative position bias in compact form: a table [heads, buckets] and the parameters of its buckets."""

    table: jax.Array
    bidirectional: bool = dataclasses.field(metadata={"static": True})
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})
    prepared: Any = None

    def buckets(self, distance: np.ndarray) -> np.ndarray:
        return bucket(
            distance, bidirectional=self.bidirectional, num_buckets=self.table.shape[-1], max_distance=self.max_distance
        )

    def matrix(self, q_length: int, k_length: int) -> jax.Array:
        """Return the bias as [heads, q, k], for query i at position i and key j at position j.

        The value depends only on j - i, so the matrix is one period of distances repeated, each row shifted by one.
        Its gradient is a sum and needs no scatter over [q, k].
        """
        period = q_length + k_length
        distance = np.arange(period)
        distance = np.where(distance < k_length, distance, distance - period)
        values = self.table[:, self.buckets(distance)]
        rows = jnp.tile(values, (1, q_length))[:, : q_length * (period - 1)]
        return rows.reshape(-1, q_length, period - 1)[:, :, :k_length]

    def matrix_by_matmul(self, q_length: int, k_length: int) -> jax.Array:
        """Return `matrix` as a product with one-hot buckets, without moving rows."""
        known = np.arange(-q_length + 1, k_length)
        is_in = self.buckets(known) == np.arange(self.table.shape[-1])[:, None]
        # A bucket is an interval of distances: from `low` to before `high`.
        low = np.where(is_in.any(1), known[is_in.argmax(1)], k_length)
        high = low + is_in.sum(1)
        position = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (q_length, k_length), axis)
        distance = position(1) - position(0)
        one_hot = (distance >= low[:, None, None]) & (distance < high[:, None, None])
        return jnp.einsum(
            "hb,bqk->hqk", self.table, one_hot.astype(self.table.dtype), precision=jax.lax.Precision.HIGHEST
        )  # fmt: skip

    def row(self, q_position: jax.Array, k_length: int) -> jax.Array:
        """Return [heads, 1, k] for a query at a traced position below `k_length`; one per row: [batch, heads, 1, k]."""
        values = self.table[:, self.buckets(np.arange(-k_length, k_length))]

        def row_at(position: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(values, k_length - position, k_length, axis=1)[:, None, :]

        return jax.vmap(row_at)(q_position) if q_position.ndim else row_at(q_position)
