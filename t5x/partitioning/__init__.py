"""Meshes, logical axes and the rules between them; multi-process runs."""

# ruff: noqa: F401

from jax.sharding import PartitionSpec

from t5x.partitioning.logical import AxisRules as LogicalAxisRules
from t5x.partitioning.logical import axis_rules, constrain, logical_to_mesh_axes, standard_logical_axis_rules
from t5x.partitioning.partitioner import (
    BasePartitioner,
    BasePjitPartitioner,
    DataLayout,
    LocalChunker,
    LocalChunkInfo,
    PjitPartitioner,
)
from t5x.partitioning.t5x_api import (
    AxisNames,
    PjittedFnWithContext,
    bounds_from_last_device,
    cached_property,
    default_mesh,
    get_coords,
    get_cpu_mesh,
    get_gpu_mesh,
    get_mesh,
    global_mesh_defined,
    host_local_array_to_global_array,
    with_sharding_constraint,
)
