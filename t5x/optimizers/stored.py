"""The state of Optax's transformations as T5X stores it, and its logical axes.

Optax keeps its state in named tuples. Stored, it is nested dictionaries by field name and position without the empty
parts, which is what T5X writes: `1/0/mu/encoder/…`, `1/0/count`. Random keys are stored as their numbers.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)

Tree = Any
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]

_SMALL = 2**16  # elements of an array that may lie on every device whole


def to_tree(state: Tree) -> dict[str, Any]:
    """An Optax state as nested dictionaries."""
    nested: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        *parents, last = _names(keys)
        level = nested
        for name in parents:
            level = level.setdefault(name, {})
        level[last] = jax.random.key_data(leaf) if _is_random_key(leaf) else jnp.asarray(leaf)
    return nested


def from_tree(nested: Tree, template: Tree) -> Tree:
    """The Optax state that `to_tree` gave as `nested`; `template` has its structure."""

    def leaf_at(keys, like):
        value = nested
        for name in _names(keys):
            value = value[name]
        return jax.random.wrap_key_data(value) if _is_random_key(like) else value

    return jax.tree_util.tree_map_with_path(leaf_at, template)


def state_axes(state: Tree, params: Tree, axes: Tree) -> dict[str, Any]:
    """Logical axes of a stored state.

    An array belongs to the parameter whose path its own path ends with. It has that parameter's axes; if dimensions
    were averaged away, those of the dimensions that are left, matched by size in their order. What belongs to no
    parameter is whole everywhere if it is small; a large array takes the axes that all parameters of its shape have.

    Args:
      state: nested dictionaries of things with a shape, see `to_tree`.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    flat_axes = treedef.flatten_up_to(axes)
    owners = {
        _names(keys): (param.shape, tuple(a or (None,) * len(param.shape)))
        for (keys, param), a in zip(flat, flat_axes, strict=True)
    }

    def axes_of(keys, leaf):
        names = _names(keys)
        for start in range(len(names)):
            if names[start:] in owners:
                return _inherited(leaf.shape, *owners[names[start:]])
        return _unowned("/".join(names), leaf, list(owners.values()))

    return jax.tree_util.tree_map_with_path(axes_of, state)


def _inherited(shape: Shape, owner_shape: Shape, owner_axes: Axes) -> Axes:
    if shape == owner_shape:
        return owner_axes
    found: list[str | None] = []
    first = 0
    for size in shape:
        place = next((d for d in range(first, len(owner_shape)) if owner_shape[d] == size > 1), None)
        found.append(None if place is None else owner_axes[place])
        first = first if place is None else place + 1
    return tuple(found)


def _unowned(name: str, leaf: Any, owners: Sequence[tuple[Shape, Axes]]) -> Axes:
    whole = (None,) * len(leaf.shape)
    if leaf.size <= _SMALL:
        return whole
    alike = {axes for shape, axes in owners if shape == leaf.shape}
    if len(alike) == 1:
        return alike.pop()
    log.warning(
        "the optimizer's %s of shape %s belongs to no parameter: it lies on every device whole", name, list(leaf.shape)
    )
    return whole


def _names(keys: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _is_random_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
