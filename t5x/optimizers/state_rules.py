"""T5X's class for the logical axes of Optax states, here matched by name and shape."""

from typing import Any

import jax

from t5x.optimizers import optax_state


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
        owners = {optax_state._names(keys): axes for keys, axes in flat}

        def axes_of(keys: Any, leaf: Any) -> Any:
            names = optax_state._names(keys)
            matches = (owners[names[start:]] for start in range(len(names)) if names[start:] in owners)
            return next(matches, None)

        return jax.tree_util.tree_map_with_path(axes_of, optax_state_tree)
