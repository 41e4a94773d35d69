"""Logical axes: names for what an array's dimensions mean, and the rules that lay them over a mesh.

The network names the axes of its parameters and activations (`batch`, `length`, `embed`, `heads` …) and knows nothing
of devices. A partitioner activates its mesh and rules around a traced function; `constrain` then pins an activation's
layout, and does nothing where no partitioner is active.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]
MeshAxes = str | tuple[str, ...] | None  # several: the dimension is divided over all of them, the first outermost
AxisRules = Sequence[tuple[str, MeshAxes]]

_active: contextvars.ContextVar[tuple[Mesh, AxisRules] | None] = contextvars.ContextVar("axis_rules", default=None)


def logical_to_mesh_axes(axes: LogicalAxes | None, rules: AxisRules) -> PartitionSpec:
    """Maps logical axes to mesh axes: the first rule of a name whose mesh axes are still free in this array wins.

    Example:
      >>> logical_to_mesh_axes(("embed", "mlp"), [("embed", "data"), ("mlp", "model")])
      PartitionSpec('data', 'model')
    """
    if axes is None:
        return PartitionSpec()
    taken: set[str] = set()
    mesh_axes: list[MeshAxes] = [None] * len(axes)
    settled = [False] * len(axes)
    for name, over in rules:
        for dim, axis in enumerate(axes):
            if axis == name and not settled[dim]:
                if over is None:
                    settled[dim] = True
                elif taken.isdisjoint(names(over)):
                    taken.update(names(over))
                    mesh_axes[dim], settled[dim] = over, True
                break
    return PartitionSpec(*mesh_axes)


def names(over: MeshAxes) -> tuple[str, ...]:
    """The mesh axes that a dimension is laid over, as a tuple."""
    return () if over is None else (over,) if isinstance(over, str) else tuple(over)


def parts(mesh: Mesh, over: MeshAxes) -> int:
    """How many parts a dimension that is laid over these mesh axes has."""
    return math.prod(mesh.shape[name] for name in names(over))


def divided(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """`spec` without the dimensions that their mesh axes do not divide: those stay whole."""
    return PartitionSpec(*(over if shape[dim] % parts(mesh, over) == 0 else None for dim, over in enumerate(spec)))


def parts_of(axis: str) -> int:
    """Into how many parts the active rules divide a logical axis; 1 where there are none."""
    active = _active.get()
    if active is None:
        return 1
    mesh, rules = active
    (over,) = logical_to_mesh_axes((axis,), rules)
    return parts(mesh, over)


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
    spec = divided(x.shape, logical_to_mesh_axes(axes, rules), mesh)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
