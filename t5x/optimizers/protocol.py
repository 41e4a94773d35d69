"""The interface between the trainer and an optimizer, and T5X's classes around it."""

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core
import flax.serialization
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

log = logging.getLogger(__name__)

Tree = Any
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]

_SMALL = 2**16  # elements of an array that may be replicated on every device


class OptimizerState(flax.struct.PyTreeNode):
    """The number of steps taken, and the state of every parameter."""

    step: jax.Array
    param_states: Tree


class Optimizer(flax.struct.PyTreeNode):
    """An optimizer with its parameters and their state; every step returns a new one."""

    optimizer_def: Any = flax.struct.field(pytree_node=False)
    state: OptimizerState = flax.struct.field(default=None)
    target: Tree = None

    def apply_gradient(self, grads: Tree, **hyper_param_overrides: Any) -> "Optimizer":
        """Return the optimizer after one step; `learning_rate=…` overrides that of the definition."""
        hyper_params = self.optimizer_def.update_hyper_params(**hyper_param_overrides)
        target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads)
        return self.replace(target=target, state=state)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer_def.state_dict(self.target, self.state)

    def restore_state(self, state: Mapping[str, Any]) -> "Optimizer":
        """Return the optimizer with the content of a `state_dict`."""
        target, state = self.optimizer_def.restore_state(self.target, self.state, state)
        return self.replace(target=target, state=state)


class OptimizerDef:
    """The base class of optimizers written for T5X: subclasses define `init_state` and `apply_gradient`.

    The trainer calls `init`, `state_axes` and `update`, which this class derives from them. An optimizer may also
    define `learning_rate_fn`, if it applies a learning rate of its own; `count(state)`, the number of steps which that
    rate has seen (see `schedules.applied_schedule`); and `trained(tree)`, if it leaves some parameters unchanged.

    Args:
      hyper_params: a `flax.struct.dataclass`; `learning_rate` is replaced by the trainer's.
    """

    def __init__(self, hyper_params: Any):
        self.hyper_params = hyper_params

    # -- to be defined by subclasses -----------------------------------------------------------------------------------

    def init_state(self, params: Tree) -> OptimizerState:
        """Return the state before the first step."""
        raise NotImplementedError(f"{type(self).__name__}.init_state")

    def apply_gradient(
        self, hyper_params: Any, params: Tree, state: OptimizerState, grads: Tree
    ) -> tuple[Tree, OptimizerState]:
        """Return (new parameters, new state)."""
        raise NotImplementedError(f"{type(self).__name__}.apply_gradient")

    # -- T5X's methods -------------------------------------------------------------------------------------------------

    def create(self, target: Tree) -> Optimizer:
        """Return an optimizer for these parameters."""
        return Optimizer(self, self.init_state(target), target)

    def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
        """Return `hyper_params` with other values; None keeps a value."""
        changes = {name: value for name, value in hyper_param_overrides.items() if value is not None}
        return self.hyper_params.replace(**changes) if changes else self.hyper_params

    def state_dict(self, target: Tree, state: OptimizerState) -> dict[str, Any]:
        stored = {"step": state.step, "param_states": self.to_stored(state.param_states)}
        return {"target": flax.core.unfreeze(target), "state": stored}

    def restore_state(self, opt_target: Tree, opt_state: OptimizerState, state_dict: Mapping[str, Any]) -> Any:
        """Return (parameters, state) with the content of a `state_dict`."""
        states = self.from_stored(state_dict["state"].get("param_states", {}), opt_state.param_states)
        target = like(opt_target, state_dict["target"])
        return target, OptimizerState(state_dict["state"]["step"], states)

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Tree) -> Optimizer:
        """Return the optimizer with logical axes (PartitionSpecs) instead of arrays, and None for the step."""
        to_axes = lambda spec: None if spec is None else tuple(spec)
        axes = jax.tree.map(to_axes, param_logical_axes, is_leaf=is_axes)
        states = as_specs(self.state_axes(optimizer.target, axes))
        param_states = self.from_stored(states, optimizer.state.param_states)
        state = optimizer.state.replace(step=None, param_states=param_states)
        return optimizer.replace(state=state, target=param_logical_axes)

    # -- the trainer's methods -----------------------------------------------------------------------------------------

    def init_param_states(self, params: Tree, axes: Tree) -> Tree:
        """Return `param_states` before the first step.

        Args:
          axes: the logical axes (tuples of names) of the parameters.
        """
        if hasattr(self, "set_param_axes"):
            self.set_param_axes(axes)
        return self.init_state(params).param_states

    def to_stored(self, param_states: Tree) -> Tree:
        """Return `param_states` as checkpoints have them: nested dictionaries of arrays."""
        return flax.serialization.to_state_dict(param_states)

    def from_stored(self, stored: Tree, param_states: Tree) -> Tree:
        """Return nested dictionaries with the classes of `param_states`."""
        return flax.serialization.from_state_dict(param_states, stored)

    def take_step(
        self,
        grads: Tree,
        param_states: Tree,
        params: Tree,
        axes: Tree,
        *,
        update: Callable[..., tuple[Tree, Tree]] | None = None,
        **step_args: jax.Array | float,
    ) -> tuple[Tree, Tree]:
        """Return (new parameters, new `param_states`); the trees may be FrozenDicts.

        Args:
          update: takes the step; None is `updated`.
          step_args: `step` and `learning_rate`.
        """
        update = functools.partial(updated, self) if update is None else update
        plain = [flax.core.unfreeze(tree) for tree in (grads, params, axes)]
        new, states = update(plain[0], self.to_stored(param_states), *plain[1:], **step_args)
        return like(params, new), self.from_stored(states, param_states)

    def init(self, params: Tree, axes: Tree) -> Tree:
        """Return the stored state before the first step; see `init_param_states`."""
        return self.to_stored(self.init_param_states(params, axes))

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        """Return the logical axes of every array of the state, so that it is sharded like the parameters."""
        return state_axes(jax.eval_shape(lambda p: self.init(p, axes), params), params, axes)

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return (new parameters, new state). `step` counts from 0; `learning_rate` is the trainer's."""
        if hasattr(self, "set_param_axes"):
            self.set_param_axes(axes)
        template = jax.eval_shape(self.init_state, params).param_states
        before = OptimizerState(step, self.from_stored(state, template))
        hyper_params = self.update_hyper_params(learning_rate=learning_rate)
        new_params, after = self.apply_gradient(hyper_params, params, before, grads)
        return new_params, self.to_stored(after.param_states)


@flax.struct.dataclass
class HyperParams:
    """What a call of `apply_gradient` may override."""

    learning_rate: Any = None


class TreeOptimizer(OptimizerDef):
    """The base class of our optimizers: they define `init`, `state_axes` and `update`, and get T5X's methods here."""

    _param_axes: Tree = None

    @property
    def hyper_params(self) -> Any:
        return HyperParams(getattr(self, "learning_rate", None))

    def with_hyper_params(self, hyper_params: Any) -> "TreeOptimizer":
        """Return this optimizer with other hyperparameters; the learning rate is an argument of `update`."""
        return self

    def set_param_axes(self, param_logical_axes: Tree) -> None:
        """Set the logical axes of the parameters, for T5X's methods."""
        self._param_axes = jax.tree.map(lambda x: x and tuple(x), param_logical_axes, is_leaf=is_axes)

    def _axes_of(self, params: Tree) -> Tree:
        return jax.tree.map(lambda _: None, params) if self._param_axes is None else self._param_axes

    def init_param_states(self, params: Tree, axes: Tree) -> Tree:
        return self.init(params, axes)

    def init_state(self, params: Tree) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), self.init_param_states(params, self._axes_of(params)))

    def apply_gradient(
        self, hyper_params: Any, params: Tree, state: OptimizerState, grads: Tree
    ) -> tuple[Tree, OptimizerState]:
        definition, axes = self.with_hyper_params(hyper_params), self._axes_of(params)
        step_args = {"step": state.step, "learning_rate": hyper_params.learning_rate}
        trees = grads, state.param_states, params, axes
        new, states = definition.take_step(*trees, update=definition.update, **step_args)
        return new, OptimizerState(state.step + 1, states)


def updated(optimizer: OptimizerDef, *trees: Tree, **step_args: jax.Array) -> tuple[Tree, Tree]:
    """Call `optimizer.update`, or `apply_gradient` if a subclass of one of our optimizers overrides it, as in T5X."""
    is_tree = isinstance(optimizer, TreeOptimizer)
    if is_tree and type(optimizer).apply_gradient is not TreeOptimizer.apply_gradient:
        return OptimizerDef.update(optimizer, *trees, **step_args)
    return optimizer.update(*trees, **step_args)


OptimizerType, OptimizerDefType = Optimizer, OptimizerDef  # T5X's names in annotations


def trained(optimizer: OptimizerDef | None, tree: Tree) -> Tree:
    """Return the part of a tree of parameters, or of their gradients, that the optimizer changes."""
    select = getattr(optimizer, "trained", None)
    return tree if select is None else select(tree)


def is_axes(node: Any) -> bool:
    """Return whether a node of a tree of axes, which may be tuples or None, is a leaf."""
    return not isinstance(node, Mapping)


def as_specs(axes: Tree) -> Tree:
    """Return PartitionSpecs instead of axes, which are tuples or `AxisMetadata`; None for None and for scalars."""

    def to_spec(names: Any) -> PartitionSpec | None:
        return PartitionSpec(*getattr(names, "names", names)) if names else None

    return jax.tree.map(to_spec, axes, is_leaf=is_axes)


def like(tree: Tree, content: Mapping[str, Any]) -> Tree:
    """Return nested dictionaries as a FrozenDict if `tree` is one."""
    return flax.core.freeze(content) if isinstance(tree, flax.core.FrozenDict) else content


def path_of(keys: tuple[Any, ...]) -> str:
    """Return the path of a leaf from JAX's key path."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def paths_in(tree: Tree) -> list[str]:
    """Return the paths of all leaves of a tree of arrays."""
    return [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def select(tree: Tree, keep: Callable[[str], bool]) -> dict[str, Any]:
    """Return the part of nested dictionaries whose paths are kept; non-dictionaries (axes, arrays, None) are leaves."""
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return flax.traverse_util.unflatten_dict({path: leaf for path, leaf in flat.items() if keep(path)}, sep="/")


# --- Optax state as T5X stores it, and its logical axes ---------------------------------------------------------------
#
# Optax keeps state in named tuples. It is stored as nested dictionaries by field name and position, without the empty
# parts, exactly as T5X writes it: `1/0/mu/encoder/…`, `1/0/count`. Random keys are stored as their data.


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
        if (owner := _owner(owners, keys)) is not None:
            return _inherited_axes(leaf.shape, *owner)
        replicated = (None,) * len(leaf.shape)
        if leaf.size <= _SMALL:
            return replicated
        candidates = {axes for shape, axes in owners.values() if shape == leaf.shape}
        if len(candidates) == 1:
            return candidates.pop()
        log.warning("optimizer state %s %s has no parameter: it is replicated", path_of(keys), list(leaf.shape))
        return replicated

    return jax.tree_util.tree_map_with_path(axes_of, state)


def _owner(owners: Mapping[tuple[str, ...], Any], keys: Sequence[Any]) -> Any:
    """Return the value of the parameter whose path ends the path of an array; None if there is none."""
    names = _names(keys)
    return next((owners[names[start:]] for start in range(len(names)) if names[start:] in owners), None)


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
        return jax.tree_util.tree_map_with_path(lambda keys, _: _owner(owners, keys), optax_state_tree)
