"""Rules that map logical axes to mesh axes."""

import dataclasses
import math
from typing import Any

from t5x._runtime.errors import ArgumentError, UserError
from t5x.partitioning.logical import AxisRules, MeshAxes


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
