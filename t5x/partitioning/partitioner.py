"""The mesh, and what lies where on it."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x.errors import UserError
from t5x.partitioning.logical import AxisRules, LogicalAxes, axis_rules, logical_to_mesh_axes
from t5x.partitioning.rules import standard_logical_axis_rules

log = logging.getLogger(__name__)


class PjitPartitioner:
    """Lays a model and its batches over a (`data`, `model`) mesh of all devices, on CPU, GPU and TPU alike.

    Args:
      num_partitions: devices that share one copy of the model; the rest is data parallel. 1 if nothing is said.
      model_parallel_submesh: the same as a block (x, y, z, cores); their product counts.
      backend: `cpu`, `gpu` or `tpu`; None takes JAX's default.
      logical_axis_rules: see `standard_logical_axis_rules`, which is the default.
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: Sequence[int] | None = None,
        backend: str | None = None,
        logical_axis_rules: AxisRules | None = None,
    ):
        if num_partitions is not None and model_parallel_submesh is not None:
            raise UserError(
                "PjitPartitioner: give num_partitions or model_parallel_submesh, not both "
                f"(they are {num_partitions} and {tuple(model_parallel_submesh)})."
            )
        if model_parallel_submesh is not None:
            num_partitions = math.prod(model_parallel_submesh)
        model = 1 if num_partitions is None else num_partitions
        try:
            devices = jax.devices(backend)
        except (RuntimeError, AssertionError) as error:
            why = (str(error) or "JAX cannot start that backend").splitlines()[0]
            where = (
                f"PjitPartitioner.backend is {backend!r}"
                if backend
                else f"JAX_PLATFORMS is {jax.config.jax_platforms!r}"
            )
            raise UserError(f"{where}, but there are no such devices: {why}") from error
        if model < 1 or len(devices) % model:
            fitting = ", ".join(str(d) for d in range(1, len(devices) + 1) if len(devices) % d == 0)
            raise UserError(
                f"PjitPartitioner.num_partitions is {model}, but there are {len(devices)} devices: "
                f"it must divide them ({fitting})."
            )
        shape = (len(devices) // model, model)
        self.mesh = Mesh(mesh_utils.create_device_mesh(shape, devices), ("data", "model"))
        self.rules = list(standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules)
        for name, axis in self.rules:
            if axis is not None and axis not in self.mesh.axis_names:
                raise UserError(
                    f"PjitPartitioner.logical_axis_rules lays {name!r} over {axis!r}; the mesh has only "
                    f"{', '.join(self.mesh.axis_names)}."
                )

    def __str__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        device = self.mesh.devices.flat[0]
        kind = device.device_kind if device.device_kind.lower() != device.platform else device.platform
        return f"{shape} ({self.mesh.size} x {kind}, {jax.process_count()} process(es))"

    # -- what lies where -----------------------------------------------------------------------------------------------

    def spec(self, shape: Sequence[int], axes: LogicalAxes | None) -> PartitionSpec:
        """Mesh axes of an array; a dimension that its mesh axis does not divide stays whole."""
        spec = logical_to_mesh_axes(axes, self.rules)
        return PartitionSpec(*(a if a and shape[d] % self.mesh.shape[a] == 0 else None for d, a in enumerate(spec)))

    def sharding(self, shape: Sequence[int], axes: LogicalAxes | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(shape, axes))

    def undivided(self, shape: Sequence[int], axes: LogicalAxes | None) -> str | None:
        """Why a dimension of this array stays whole though a rule would divide it; None where none does."""
        for dim, axis in enumerate(logical_to_mesh_axes(axes, self.rules)):
            if axis and shape[dim] % self.mesh.shape[axis]:
                return f"{axes[dim]}={shape[dim]} is not a multiple of {axis}={self.mesh.shape[axis]}"
        return None

    @property
    def batch_sharding(self) -> NamedSharding:
        """Rows over `data`, the rest whole."""
        return NamedSharding(self.mesh, logical_to_mesh_axes(("batch",), self.rules))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    # -- batches -------------------------------------------------------------------------------------------------------

    def rows(self, batch_size: int) -> range:
        """The rows of the global batch that this process has to read."""
        (axis,) = logical_to_mesh_axes(("batch",), self.rules)
        parts = self.mesh.shape[axis] if axis else 1
        if batch_size % parts:
            raise UserError(
                f"The batch size {batch_size} is not a multiple of the {parts} data-parallel parts of the mesh "
                f"({self}). Set BATCH_SIZE to a multiple of {parts}, or raise PjitPartitioner.num_partitions."
            )
        slices = [index[0] for index in self.batch_sharding.addressable_devices_indices_map((batch_size,)).values()]
        starts = [s.start or 0 for s in slices]
        stops = [batch_size if s.stop is None else s.stop for s in slices]
        return range(min(starts), max(stops))

    def to_devices(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows as arrays of the global batch."""
        sharding = self.batch_sharding
        return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}

    # -- functions -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Makes the network's own layout constraints effective for what is traced inside."""
        with axis_rules(self.mesh, self.rules):
            yield

    def partition(
        self, fn: Callable, *, in_shardings: Any, out_shardings: Any, donate_argnums: tuple[int, ...] = ()
    ) -> Callable:
        """`jax.jit` over the mesh."""

        def traced(*args):
            with self.activate():
                return fn(*args)

        return jax.jit(traced, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate_argnums)
