"""Logical axes: names for what an array's dimensions mean, and the rules that lay them over a mesh.

The network names the axes of its parameters and activations (`batch`, `length`, `embed`, `heads` …) and knows nothing
of devices. A partitioner activates its mesh and rules around a traced function; `constrain` then pins an activation's
layout, and does nothing where no partitioner is active.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]
AxisRules = Sequence[tuple[str, str | None]]

_active: contextvars.ContextVar[tuple[Mesh, AxisRules] | None] = contextvars.ContextVar("axis_rules", default=None)


def logical_to_mesh_axes(axes: LogicalAxes | None, rules: AxisRules) -> PartitionSpec:
    """Maps logical axes to mesh axes: the first rule of a name whose mesh axis is still free in this array wins.

    Example:
      >>> logical_to_mesh_axes(("embed", "mlp"), [("embed", "data"), ("mlp", "model")])
      PartitionSpec('data', 'model')
    """
    if axes is None:
        return PartitionSpec()
    taken: set[str] = set()
    mesh_axes: list[str | None] = [None] * len(axes)
    settled = [False] * len(axes)
    for name, mesh_axis in rules:
        for dim, axis in enumerate(axes):
            if axis == name and not settled[dim]:
                if mesh_axis is None:
                    settled[dim] = True
                elif mesh_axis not in taken:
                    taken.add(mesh_axis)
                    mesh_axes[dim], settled[dim] = mesh_axis, True
                break
    return PartitionSpec(*mesh_axes)


@contextlib.contextmanager
def axis_rules(mesh: Mesh, rules: AxisRules) -> Iterator[None]:
    """Makes `constrain` effective for what is traced inside."""
    token = _active.set((mesh, rules))
    try:
        yield
    finally:
        _active.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Asks the compiler to keep `x` laid out by its logical `axes`; the identity outside `axis_rules`."""
    active = _active.get()
    if active is None:
        return x
    mesh, rules = active
    spec = logical_to_mesh_axes(axes, rules)
    # A dimension that the mesh axis does not divide (an odd last batch, a short sequence) stays whole.
    spec = PartitionSpec(*(a if a and x.shape[d] % mesh.shape[a] == 0 else None for d, a in enumerate(spec)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
