"""Meshes, logical axes and the rules between them; multi-process runs."""

from jax.sharding import PartitionSpec

from t5x.partitioning.chunks import LocalChunker, LocalChunkInfo
from t5x.partitioning.logical import AxisRules as LogicalAxisRules
from t5x.partitioning.logical import axis_rules, constrain, logical_to_mesh_axes
from t5x.partitioning.partitioner import BasePartitioner, BasePjitPartitioner, DataLayout, PjitPartitioner
from t5x.partitioning.rules import standard_logical_axis_rules

__all__ = [
    "BasePartitioner",
    "BasePjitPartitioner",
    "DataLayout",
    "LocalChunkInfo",
    "LocalChunker",
    "LogicalAxisRules",
    "PartitionSpec",
    "PjitPartitioner",
    "axis_rules",
    "constrain",
    "logical_to_mesh_axes",
    "standard_logical_axis_rules",
]
