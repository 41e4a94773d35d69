"""Parameter trees by name: flattening, comparing, printing.

A leaf's name is its path with `/` between the keys, as in T5X: `target/encoder/layers_0/mlp/wo/kernel`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import PartitionSpec

from t5x._runtime.errors import UserError

_ROWS = 20  # in a difference table; the rest is only counted


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return {name: leaf} in the order of jax.tree.leaves.

    >>> flatten({"encoder": {"scale": 1}, "step": 2})
    {'encoder/scale': 1, 'step': 2}
    """
    flat: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]:
        keys = [_text(key) for key in path]
        name = "/".join(keys)
        if any(key == "" or "/" in key for key in keys):
            raise UserError(f"Parameter {name!r}: a key of the tree is empty or contains '/'. Rename that module.")
        if name in flat:
            raise UserError(f"Two parameters are both called {name!r}. Rename one of them.")
        flat[name] = leaf
    return flat


def _text(key: Any) -> str:
    if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str):  # the common case, and much faster
        return key.key
    return jax.tree_util.keystr((key,), simple=True)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dictionaries from which `flatten` gives `flat`."""
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def difference(expected: Any, actual: Any) -> str:
    """Return a short table of the differences of two trees of things with `.shape`; empty if there are none.

    >>> model = {"bias": np.zeros(2), "kernel": np.zeros((2, 3))}
    >>> checkpoint = {"kernel": np.zeros((4, 3)), "scale": np.zeros(4)}
    >>> print(difference(model, checkpoint))
    1 missing, 1 unexpected, 1 of another shape:
                          expected  found
      missing     bias    [2]       -
      unexpected  scale   -         [4]
      shape       kernel  [2, 3]    [4, 3]
    """
    return difference_by_name(flatten(expected), flatten(actual))


def difference_by_name(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Return the `difference` of two flat trees."""
    missing = [("missing", name, _shape(leaf), "-") for name, leaf in expected.items() if name not in actual]
    unexpected = [("unexpected", name, "-", _shape(leaf)) for name, leaf in actual.items() if name not in expected]
    reshaped = [
        ("shape", name, _shape(leaf), _shape(actual[name]))
        for name, leaf in expected.items()
        if name in actual and tuple(leaf.shape) != tuple(actual[name].shape)
    ]
    rows = missing + unexpected + reshaped
    if not rows:
        return ""
    counts = ((len(missing), "missing"), (len(unexpected), "unexpected"), (len(reshaped), "of another shape"))
    lines = [", ".join(f"{count} {what}" for count, what in counts if count) + ":"]
    lines += ["  " + line for line in _align([("", "", "expected", "found"), *rows[:_ROWS]])]
    if len(rows) > _ROWS:
        rest = Counter(kind for kind, *_ in rows[_ROWS:])
        kinds = ", ".join(f"{count} {kind}" for kind, count in rest.items())
        lines.append(f"  … and {len(rows) - _ROWS} more ({kinds})")
    return "\n".join(lines)


def parameter_table(
    params: Any,
    axes: Any,
    specs: Any,
    *,
    optimizer_state: Any = None,
    optimizer_axes: Any = None,
    optimizer_specs: Any = None,
) -> list[str]:
    """Return the lines of model-info.txt: each variable with its size, shape and partitioning, and the totals.

    Args:
      params: tree of things with `.shape`.
      axes: the same tree with a tuple of logical axis names (or None) for a leaf; a leaf may be missing.
      specs: the same tree with a PartitionSpec (or a NamedSharding, or None) for a leaf; a leaf may be missing.
      optimizer_state, optimizer_axes, optimizer_specs: the same for the optimizer, printed after the parameters.

    >>> params, axes, specs = {"scale": np.zeros(8)}, {"scale": ("embed",)}, {"scale": PartitionSpec(None)}
    >>> print("\\n".join(parameter_table(params, axes, specs)))
    Variable  scale  size 8  shape (embed=8)  partition spec (None,)
    Total number of parameters: 8
    """
    lines = _variable_lines(params, axes, specs)
    lines.append(f"Total number of parameters: {_count(params):,}")
    if optimizer_state is not None:
        lines += ["", "Optimizer state:", *_variable_lines(optimizer_state, optimizer_axes, optimizer_specs)]
        lines.append(f"Total size of the optimizer state: {_count(optimizer_state):,}")
    return lines


def _variable_lines(tree: Any, axes: Any, specs: Any) -> list[str]:
    axes, specs = _flatten_annotations(axes), _flatten_annotations(specs)
    rows: list[tuple[str, ...]] = []
    for name, leaf in flatten(tree).items():
        size = f"{math.prod(leaf.shape):,}"
        shape = f"shape {_shape_with_axes(name, leaf.shape, axes.get(name))}"
        rows.append(("Variable", name, f"size {size}", shape, f"partition spec {_spec(specs.get(name))}"))
    return _align(rows)


def _flatten_annotations(tree: Any) -> dict[str, Any]:
    """Flatten trees whose leaves are containers (axis names, PartitionSpecs) or None."""
    return {} if tree is None else flatten(tree, is_leaf=lambda node: not isinstance(node, Mapping))


def _shape_with_axes(name: str, shape: tuple[int, ...], axes: Any) -> str:
    if axes is None:
        return "(" + ", ".join(str(size) for size in shape) + ")"
    names = tuple(axes)
    if len(names) != len(shape):
        raise ValueError(f"{name} has shape {tuple(shape)} but logical axes {names}")
    return "(" + ", ".join(f"{axis}={size}" for axis, size in zip(names, shape, strict=True)) + ")"


def _spec(spec: Any) -> str:
    spec = getattr(spec, "spec", spec)
    return str(tuple(spec)) if isinstance(spec, PartitionSpec) else str(spec)


def _shape(leaf: Any) -> str:
    return str(list(leaf.shape))


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    """Return each row as a line, cells padded to the width of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def section(name: str) -> str:
    """Return the section of the state that an array belongs to: `target`, `state/step` or `state/param_states`."""
    return "/".join(name.split("/")[: 2 if name.startswith("state/") else 1])


def as_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding (None for host arrays) of anything array-like."""
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=getattr(leaf, "sharding", None))
