"""Rules that map logical axes to mesh axes."""

from typing import Any

from t5x.errors import ArgumentError
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
