"""Optax state as T5X stores it, and its logical axes.

Optax keeps state in named tuples. It is stored as nested dictionaries by field name and position, without the empty
parts, exactly as T5X writes it: `1/0/mu/encoder/…`, `1/0/count`. Random keys are stored as their data.
"""

import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)

Tree = Any
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]

_SMALL = 2**16  # elements of an array that may be replicated on every device


def without_keys(state: Tree) -> Tree:
    """Return an Optax state of arrays: random keys are replaced by their data, numbers by arrays."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_random_key(leaf) else jnp.asarray(leaf), state)


def with_keys(state: Tree, template: Tree) -> Tree:
    """Return a state of arrays with the random keys that `template` has."""
    return jax.tree.map(lambda x, like: jax.random.wrap_key_data(x) if _is_random_key(like) else x, state, template)


def to_tree(state: Tree) -> dict[str, Any]:
    """Convert an Optax state of arrays, or of axes, which may be None, to nested dictionaries."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: node is None)
    return flax.traverse_util.unflatten_dict({_names(keys): leaf for keys, leaf in leaves})


def from_tree(nested: Tree, template: Tree) -> Tree:
    """Convert nested dictionaries back to an Optax state with the structure of `template`."""
    leaf_at = lambda keys, _: functools.reduce(operator.getitem, _names(keys), nested)
    return jax.tree_util.tree_map_with_path(leaf_at, template)


def state_axes(state: Tree, params: Tree, axes: Tree) -> dict[str, Any]:
    """Return the logical axes of a stored state.

    An array belongs to the parameter whose path is a suffix of its own path, and has that parameter's axes. If it has
    fewer dimensions (averages), the remaining ones are matched by size, in order. Other arrays are replicated if small;
    a large one gets the axes of the parameters of the same shape if these agree.

    Args:
      state: nested dictionaries of arrays or shapes, see `to_tree`.
      params: the parameters.
      axes: their logical axes.
    """
    owners: dict[tuple[str, ...], tuple[Shape, Axes]] = {}

    def add_owner(keys, param, own):
        owners[_names(keys)] = (param.shape, tuple(own or (None,) * len(param.shape)))

    jax.tree_util.tree_map_with_path(add_owner, params, axes)

    def axes_of(keys, leaf):
        names = _names(keys)
        for start in range(len(names)):
            if names[start:] in owners:
                return _inherited_axes(leaf.shape, *owners[names[start:]])
        replicated = (None,) * len(leaf.shape)
        if leaf.size <= _SMALL:
            return replicated
        candidates = {axes for shape, axes in owners.values() if shape == leaf.shape}
        if len(candidates) == 1:
            return candidates.pop()
        log.warning("optimizer state %s %s has no parameter: it is replicated", "/".join(names), list(leaf.shape))
        return replicated

    return jax.tree_util.tree_map_with_path(axes_of, state)


def _inherited_axes(shape: Shape, owner_shape: Shape, owner_axes: Axes) -> Axes:
    if shape == owner_shape:
        return owner_axes
    axes: list[str | None] = []
    first = 0
    for size in shape:
        dimension = next((d for d in range(first, len(owner_shape)) if owner_shape[d] == size > 1), None)
        axes.append(None if dimension is None else owner_axes[dimension])
        first = first if dimension is None else dimension + 1
    return tuple(axes)


def _names(keys: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _is_random_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class OptaxStatePartitionRules:
    """The logical axes of an Optax state; unlike T5X's, without a table of its classes."""

    @classmethod
    def derive_params_axes(cls, optax_state_tree: Any, params_axes: Any) -> Any:
        """Return the logical axes of parameters, unchanged."""
        return params_axes

    @classmethod
    def derive_optax_logical_axes(cls, optax_state_tree: Any, params_axes: Any) -> Any:
        """Return the state with logical axes instead of arrays.

        Args:
          optax_state_tree: a state, or its shapes.
          params_axes: logical axes of the parameters. An array belongs to the parameter whose path ends its own.
        """
        is_axes = lambda node: node is None or isinstance(node, tuple)
        flat = jax.tree_util.tree_leaves_with_path(params_axes, is_axes)
        owners = {_names(keys): axes for keys, axes in flat}

        def axes_of(keys: Any, leaf: Any) -> Any:
            names = _names(keys)
            matches = (owners[names[start:]] for start in range(len(names)) if names[start:] in owners)
            return next(matches, None)

        return jax.tree_util.tree_map_with_path(axes_of, optax_state_tree)
