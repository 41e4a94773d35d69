"""Which mesh axis each logical axis is laid over."""

from t5x.errors import UserError
from t5x.partitioning.logical import AxisRules, MeshAxes


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: AxisRules | None = None,
) -> list[tuple[str, MeshAxes]]:
    """T5X's four rule sets over the mesh axes `data` and `model`.

    Args:
      activation_partitioning_dims: 2 lays the embedding axis of activations over `model` too.
      parameter_partitioning_dims: 2 lays the embedding axis of parameters over `data` (fully sharded parameters).
      additional_rules: appended; for logical axes of your own.
    """
    for name, value in (("activation", activation_partitioning_dims), ("parameter", parameter_partitioning_dims)):
        if value not in (1, 2):
            raise UserError(f"standard_logical_axis_rules.{name}_partitioning_dims is {value!r}: it must be 1 or 2.")
    embed: dict[tuple[int, int], list[MeshAxes]] = {
        (1, 1): [None], (2, 1): ["model"], (1, 2): ["data"], (2, 2): ["model", "data"],
    }  # fmt: skip
    rules: list[tuple[str, MeshAxes]] = [
        ("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("heads", "model"), ("joined_kv", "model"),
        ("kv", None),
    ]  # fmt: skip
    rules += [("embed", axis) for axis in embed[activation_partitioning_dims, parameter_partitioning_dims]]
    whole = ("relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations")
    return rules + [(name, None) for name in whole] + list(additional_rules or ())
