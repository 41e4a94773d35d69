"""The part of an array that the devices of one process hold."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class LocalChunkInfo(NamedTuple):
    """The part of an array that a process holds.

    Attributes:
      slice: its position in the array.
      replica_id: how many processes with a lower index hold the same part.
    """

    slice: tuple[slice, ...]
    replica_id: int


class LocalChunker:
    """Finds the chunks of this process on a mesh."""

    def __init__(self, global_mesh: Mesh):
        self.global_mesh = global_mesh

    def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: PartitionSpec | None) -> LocalChunkInfo:
        """Return the smallest block that contains all shards of this process."""
        sharding = NamedSharding(self.global_mesh, mesh_axes or PartitionSpec())
        blocks: dict[int, list[tuple[slice, ...]]] = {}
        indices: Mapping[jax.Device, tuple[slice, ...]] = sharding.devices_indices_map(tuple(global_shape))
        for device, index in indices.items():
            blocks.setdefault(device.process_index, []).append(index)

        def hull(indices: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
            by_dimension = zip(global_shape, zip(*indices, strict=True), strict=True)
            ranges = [[range(size)[part] for part in parts] for size, parts in by_dimension]
            return tuple(slice(min(r.start for r in rs), max(r.stop for r in rs)) for rs in ranges)

        mine = hull(blocks[jax.process_index()])
        replica = sum(hull(blocks[process]) == mine for process in blocks if process < jax.process_index())
        return LocalChunkInfo(mine, replica)

    def get_shard_id(self, mesh_axis: str) -> int:
        """Return the index of this process along a mesh axis."""
        size = self.global_mesh.shape[mesh_axis]
        chunk = self.get_local_chunk_info((size,), PartitionSpec(mesh_axis)).slice[0]
        return chunk.start // (chunk.stop - chunk.start)

    def get_replica_id(self, mesh_axis: str) -> int:
        """Return how many processes with a lower index have the same position along a mesh axis."""
        return self.get_local_chunk_info((self.global_mesh.shape[mesh_axis],), PartitionSpec(mesh_axis)).replica_id
