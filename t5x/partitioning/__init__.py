"""Meshes, logical axes and the rules between them; multi-process runs."""

from t5x.partitioning.logical import axis_rules, constrain, logical_to_mesh_axes
from t5x.partitioning.partitioner import PjitPartitioner
from t5x.partitioning.rules import standard_logical_axis_rules

__all__ = ["PjitPartitioner", "axis_rules", "constrain", "logical_to_mesh_axes", "standard_logical_axis_rules"]
