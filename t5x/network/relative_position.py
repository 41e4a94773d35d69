"""T5's relative position bias: a learned value per head and bucket of distances."""

import dataclasses
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import initializers

from t5x.network.keys import Keys
from t5x.network.layers import parameter
from t5x.partitioning.devices import platform


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


@dataclasses.dataclass(frozen=True)
class Preparable:
    """A dataclass with a field `prepared`: what a backend of attention derived from the other fields, or None."""

    def replace(self, **updates: Any) -> Self:
        """Return a copy with these fields, and without `prepared`, which belongs to the old ones."""
        return dataclasses.replace(self, **{"prepared": None, **updates})


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
        # TPUs would move every row between lanes. They multiply by one-hot buckets, computed where they are needed.
        if platform() == "tpu":
            return self._matrix_by_matmul(q_length, k_length)
        period = q_length + k_length
        distance = np.arange(period)
        distance = np.where(distance < k_length, distance, distance - period)
        values = self.table[:, self.buckets(distance)]
        rows = jnp.tile(values, (1, q_length))[:, : q_length * (period - 1)]
        return rows.reshape(-1, q_length, period - 1)[:, :, :k_length]

    def _matrix_by_matmul(self, q_length: int, k_length: int) -> jax.Array:
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
        at = lambda position: jax.lax.dynamic_slice_in_dim(values, k_length - position, k_length, axis=1)[:, None, :]
        return jax.vmap(at)(q_position) if q_position.ndim else at(q_position)


class RelativePositionBias(nn.Module):
    """The module that owns a bias table."""

    num_heads: int
    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, keys: Keys) -> RelativeBias:
        init = initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape = (self.num_heads, self.num_buckets)
        table = parameter(self, "rel_embedding", init, shape, ("heads", "relpos_buckets"), keys)
        return RelativeBias(table, self.bidirectional, self.max_distance)
