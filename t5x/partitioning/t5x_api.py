"""T5X's functions for meshes, over `meshes`."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x.partitioning import logical, meshes
from t5x.partitioning.partitioner import BasePartitioner, model_axis_size

cached_property = functools.cached_property


class AxisNames(tuple):
    """Logical axes of an array, as one leaf of a tree."""

    def __new__(cls, *names: str | None) -> "AxisNames":
        return super().__new__(cls, names)

    def __repr__(self) -> str:
        return f"AxisNames{tuple(self)}"


class PjittedFnWithContext:
    """A compiled function that runs under a mesh and its rules.

    Args:
      pjitted_fn: the result of `jax.jit`.
      partition_mesh: the mesh.
      logical_axis_rules: rules that make the network's sharding constraints effective.
    """

    def __init__(self, pjitted_fn: jax.stages.Wrapped, partition_mesh: Mesh, logical_axis_rules: Sequence[Any] = ()):
        self._pjitted_fn, self._mesh, self._rules = pjitted_fn, partition_mesh, logical_axis_rules

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return logical.axis_rules(self._mesh, self._rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._pjitted_fn(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._pjitted_fn.lower(*args, **kwargs)


def default_mesh(
    num_partitions: int,
    model_parallel_submesh: Sequence[int] | None = None,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
) -> Mesh:
    """Return the mesh of a partitioner with these arguments."""
    has_shape = ici_mesh_shape is not None or model_parallel_submesh is not None
    return BasePartitioner(
        None if has_shape else num_partitions, model_parallel_submesh, backend=backend, ici_mesh_shape=ici_mesh_shape,
        dcn_mesh_shape=dcn_mesh_shape,
    ).mesh  # fmt: skip


def get_mesh(
    model_parallel_submesh: Sequence[int],
    input_devices: Sequence[Any] = (),
    input_local_devices: Sequence[Any] = (),
    tile_by_host_if_needed: bool = True,
    backend: str | None = None,
) -> Mesh:
    """Return a (`data`, `model`) mesh whose model axis has the size of the submesh."""
    devices = list(input_devices) or meshes.devices_of(backend)
    return meshes.model_parallel(model_axis_size(None, model_parallel_submesh), devices)


def get_cpu_mesh() -> Mesh:
    """Return a (`data`, `model`) mesh of all CPUs: processes times devices of each, as in T5X."""
    devices = meshes.devices_of("cpu")
    return meshes.model_parallel(len(devices) // jax.process_count(), devices)


def get_gpu_mesh(num_partitions: int) -> Mesh:
    """Return a (`data`, `model`) mesh of all GPUs."""
    return meshes.model_parallel(num_partitions, meshes.devices_of("gpu"))


def get_coords(device: Any) -> tuple[int, ...]:
    """Return the coordinates of a device: of a TPU (x, y, z, core), of others (process, number in the process)."""
    if hasattr(device, "coords"):
        return (*device.coords, device.core_on_chip)
    return device.process_index, device.id % jax.local_device_count()


def bounds_from_last_device(last_device: Any) -> tuple[int, ...]:
    """Return the shape of the grid of devices, given the last of them."""
    if hasattr(last_device, "coords"):
        return tuple(coordinate + 1 for coordinate in get_coords(last_device))
    return jax.process_count(), jax.local_device_count()


def global_mesh_defined() -> bool:
    """Return whether code runs under a mesh."""
    return logical.active_mesh() is not None or not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrain the sharding of `x` to a PartitionSpec of the partitioner's mesh; the identity outside of one."""
    mesh = logical.active_mesh()
    if mesh is None or axis_resources is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, axis_resources))


def host_local_array_to_global_array(arr_tree: Any, mesh: Mesh, pspecs: Any) -> Any:
    """Return arrays of all processes, given the part of each process."""
    if jax.process_count() > 1:
        return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, pspecs)
    is_leaf = lambda x: x is None or isinstance(x, PartitionSpec)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec or PartitionSpec()), pspecs, is_leaf=is_leaf)
    return jax.device_put(arr_tree, shardings)
