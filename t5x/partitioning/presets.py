"""Named kinds of parallelism, for `PjitPartitioner(preset=...)`."""

import dataclasses
import math

from t5x.errors import UserError
from t5x.partitioning.logical import AxisRules
from t5x.partitioning.rules import standard_logical_axis_rules


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
