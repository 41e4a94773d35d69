"""Logical axes: names for the dimensions of an array, and rules that map them to mesh axes.

The network names the axes of its parameters and activations (`batch`, `length`, `embed`, `heads` …) and knows nothing
about devices. A partitioner activates its mesh and rules around a traced function; `constrain` then fixes the sharding
of an activation. Without an active partitioner it does nothing.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]
MeshAxes = str | tuple[str, ...] | None  # several: the dimension is sharded over all of them, the first outermost
AxisRules = Sequence[tuple[str, MeshAxes]]

_active: contextvars.ContextVar[tuple[Mesh, AxisRules] | None] = contextvars.ContextVar("axis_rules", default=None)


def logical_to_mesh_axes(axes: LogicalAxes | None, rules: AxisRules) -> PartitionSpec:
    """Map logical axes to mesh axes: the first rule of a name whose mesh axes are still unused in this array wins.

    Example:
      >>> tuple(logical_to_mesh_axes(("embed", "mlp"), [("embed", "data"), ("mlp", "model")]))
      ('data', 'model')
    """
    if axes is None:
        return PartitionSpec()
    used: set[str] = set()
    mesh_axes: dict[int, MeshAxes] = {}
    for name, over in rules:
        dim = next((n for n, axis in enumerate(axes) if axis == name and n not in mesh_axes), None)
        if dim is not None and used.isdisjoint(axis_names(over)):
            used.update(axis_names(over))
            mesh_axes[dim] = over
    return PartitionSpec(*(mesh_axes.get(dim) for dim in range(len(axes))))


def axis_names(over: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of a dimension as a tuple."""
    return () if over is None else (over,) if isinstance(over, str) else tuple(over)


def count_shards(mesh: Mesh, over: MeshAxes) -> int:
    """Return the number of shards of a dimension over these mesh axes."""
    return math.prod(mesh.shape[name] for name in axis_names(over))


def drop_uneven(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return `spec` without the dimensions that their mesh axes do not divide evenly; those are not sharded."""
    return PartitionSpec(
        *(over if shape[dim] % count_shards(mesh, over) == 0 else None for dim, over in enumerate(spec))
    )


def shards_of(axis: str, array: Sequence[str] = ()) -> int:
    """Return the number of shards of an axis; 1 without active rules.

    Args:
      array: the logical axes of the array, if it has others, which may be sharded over the same mesh axes.
    """
    active = _active.get()
    if active is None:
        return 1
    mesh, rules = active
    axes = tuple(array) or (axis,)
    return count_shards(mesh, logical_to_mesh_axes(axes, rules)[axes.index(axis)])


def active_mesh() -> Mesh | None:
    """Return the mesh of the active rules; None if there are none."""
    active = _active.get()
    return None if active is None else active[0]


@contextlib.contextmanager
def axis_rules(mesh: Mesh, rules: AxisRules) -> Iterator[None]:
    """Make `constrain` effective for everything traced inside the block."""
    token = _active.set((mesh, rules))
    try:
        yield
    finally:
        _active.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of `x` to its logical `axes`; the identity outside `axis_rules`."""
    active = _active.get()
    if active is None:
        return x
    mesh, rules = active
    spec = drop_uneven(x.shape, logical_to_mesh_axes(axes, rules), mesh)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def on_each_device(
    function: Callable[..., Any],
    axes: Sequence[Any],
    out_axes: Any,
    *arguments: Any,
) -> Any:
    """Call `function` on every device with its shard of the arguments; outside `axis_rules`, call it directly.

    For functions that the compiler cannot partition, such as our own kernels. Gradients are summed over the devices
    that hold the same shard.

    Args:
      axes: logical axes of each argument; for a tree of arrays, those of every array in it, or a tree of axes. An axis
        that does not divide evenly in some argument is not sharded in any of them.
      out_axes: logical axes of the result, in the same way.
    """
    active = _active.get()
    if active is None or active[0].size == 1:
        return function(*arguments)
    mesh, rules = active
    uneven = set()

    def is_axes(node: Any) -> bool:
        return type(node) is tuple

    def find_uneven(names_of: LogicalAxes, arrays: Any) -> None:
        for array in jax.tree.leaves(arrays):
            for size, axis, over in zip(array.shape, names_of, logical_to_mesh_axes(names_of, rules), strict=True):
                if size % count_shards(mesh, over):
                    uneven.add(axis)

    jax.tree.map(find_uneven, list(axes), list(arguments), is_leaf=is_axes)

    def spec(names_of: LogicalAxes) -> PartitionSpec:
        return logical_to_mesh_axes(tuple(None if a in uneven else a for a in names_of), rules)

    in_specs, out_specs = (jax.tree.map(spec, tree, is_leaf=is_axes) for tree in (list(axes), out_axes))
    divide = jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    return divide(*arguments)
