"""Logical axes: names for the dimensions of an array, and rules and presets that map them to mesh axes.

The network names the axes of its parameters and activations (`batch`, `length`, `embed`, `heads` …) and knows nothing
about devices. A partitioner activates its mesh and rules around a traced function; `constrain` then fixes the sharding
of an activation. Without an active partitioner it does nothing.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x._runtime.errors import ArgumentError, UserError

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


# --- Rules and presets ------------------------------------------------------------------------------------------------


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: AxisRules | None = None,
) -> list[tuple[str, MeshAxes]]:
    """Return one of T5X's four rule sets for the mesh axes `data` and `model`.

    Args:
      activation_partitioning_dims: 2 also shards the embedding axis of activations over `model`.
      parameter_partitioning_dims: 2 shards the embedding axis of parameters over `data` (fully sharded parameters).
      additional_rules: appended; for your own logical axes.
    """
    for name, value in (("activation", activation_partitioning_dims), ("parameter", parameter_partitioning_dims)):
        if value not in (1, 2):
            setting = f"standard_logical_axis_rules.{name}_partitioning_dims"
            raise ArgumentError(f"{setting} is {value!r}: it must be 1 or 2.")
    embed: dict[tuple[int, int], list[MeshAxes]] = {
        (1, 1): [None], (2, 1): ["model"], (1, 2): ["data"], (2, 2): ["model", "data"],
    }  # fmt: skip
    rules: list[tuple[str, MeshAxes]] = [
        ("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("heads", "model"), ("joined_kv", "model"),
        ("kv", None),
    ]  # fmt: skip
    rules += [("embed", axis) for axis in embed[activation_partitioning_dims, parameter_partitioning_dims]]
    where = "standard_logical_axis_rules.additional_rules"
    additional = [] if additional_rules is None else check_rules(additional_rules, where)
    whole = ("relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations")
    return rules + [(name, None) for name in whole] + additional


def check_rules(rules: Any, where: str) -> list[tuple[str, MeshAxes]]:
    """Return the rules as pairs, with tuples for several mesh axes; raise an ArgumentError with `where` if invalid."""
    form = "rules are a list of pairs, [('batch', 'data'), ('embed', None), ('mlp', ('data', 'model'))]"
    if not isinstance(rules, list | tuple):
        raise ArgumentError(f"{where} is {rules!r}: {form}.")
    return [_pair(rule, where, form) for rule in rules]


def _pair(rule: Any, where: str, form: str) -> tuple[str, MeshAxes]:
    if isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str):
        name, over = rule
        if over is None or isinstance(over, str):
            return name, over
        if isinstance(over, list | tuple) and all(isinstance(axis, str) for axis in over):
            if len(set(over)) < len(over):
                raise ArgumentError(f"{where} shards {name!r} over {tuple(over)}: name each mesh axis once.")
            return name, tuple(over)
    raise ArgumentError(
        f"{where} has the rule {rule!r}: {form}, each the name of a logical axis and the mesh axes that shard it, or "
        "None."
    )


@dataclasses.dataclass(frozen=True)
class Preset:
    """A way to shard a model over devices.

    Attributes:
      what: what is sharded.
      parameter_dims: `parameter_partitioning_dims` of its rules: 2 shards parameters over `data`.
      model_parallel: whether it has a `model` axis, whose size `num_partitions` may set.
    """

    what: str
    parameter_dims: int
    model_parallel: bool

    def rules(self) -> AxisRules:
        return standard_logical_axis_rules(parameter_partitioning_dims=self.parameter_dims)


PRESETS = {
    # The fastest, if the model with its optimizer fits on one device.
    "dp": Preset("Data parallel: each device has all parameters and computes its rows of the batch.", 1, False),
    # For models that do not fit on one device, if the batch has a row for each device: the first thing to try.
    "fsdp": Preset(
        "Data parallel, with parameters and optimizer state sharded over all devices and gathered layer by layer.",
        parameter_dims=2, model_parallel=False,
    ),
    # For batches smaller than the number of devices, or low latency with a large model.
    "tp": Preset(
        "Model parallel within each machine (heads, MLPs and vocabulary are sharded), data parallel across machines.",
        parameter_dims=1, model_parallel=True,
    ),
    # For models so large, or devices so many, that fsdp alone gathers too much.
    "2d": Preset(
        "A near-square data x model mesh; parameters and optimizer state are sharded over both of its axes.",
        parameter_dims=2, model_parallel=True,
    ),
}  # fmt: skip


def preset_named(name: str) -> Preset:
    """Return the preset with this name."""
    if not isinstance(name, str) or name not in PRESETS:
        lines = "\n".join(f"  {key}: {preset.what}" for key, preset in PRESETS.items())
        raise UserError(f"PjitPartitioner.preset is {name!r}. Choose one of:\n{lines}")
    return PRESETS[name]


def model_axis(name: str, num_devices: int, machine_sizes: list[int]) -> int:
    """Return how many devices share a copy of the model under a preset, if `num_partitions` is not set.

    Args:
      name: of the preset.
      num_devices: all devices of the run.
      machine_sizes: number of devices on each machine.
    """
    if name == "tp":
        if len(set(machine_sizes)) > 1:
            raise UserError(
                "PjitPartitioner.preset 'tp' makes each machine one model-parallel group, but the machines have "
                f"{', '.join(map(str, machine_sizes))} devices. Set num_partitions to the size of a group."
            )
        return machine_sizes[0]
    if name == "2d":
        return max(d for d in range(1, math.isqrt(num_devices) + 1) if num_devices % d == 0)
    return 1
