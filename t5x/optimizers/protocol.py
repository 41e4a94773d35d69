"""The interface between the trainer and an optimizer, and T5X's classes around it."""

from collections.abc import Mapping
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp

from t5x.optimizers import optax_state

Tree = Any


@flax.struct.dataclass
class OptimizerState:
    """The number of steps taken, and the state of every parameter."""

    step: jax.Array
    param_states: Tree


@flax.struct.dataclass
class Optimizer:
    """An optimizer with its parameters and their state; every step returns a new one."""

    optimizer_def: Any = flax.struct.field(pytree_node=False)
    state: OptimizerState = None
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
    rate has seen (see `learning_rates.py`); and `trained(tree)`, if it leaves some parameters unchanged.

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
        given = {name: value for name, value in hyper_param_overrides.items() if value is not None}
        return self.hyper_params.replace(**given) if given else self.hyper_params

    def state_dict(self, target: Tree, state: OptimizerState) -> dict[str, Any]:
        to_dict = flax.serialization.to_state_dict
        return {"target": to_dict(target), "state": to_dict(state)}

    def restore_state(self, opt_target: Tree, opt_state: OptimizerState, state_dict: Mapping[str, Any]) -> Any:
        """Return (parameters, state) with the content of a `state_dict`."""
        from_dict = flax.serialization.from_state_dict
        return from_dict(opt_target, state_dict["target"]), from_dict(opt_state, state_dict["state"])

    # -- the trainer's methods -----------------------------------------------------------------------------------------

    def init(self, params: Tree, axes: Tree) -> Tree:
        """Return the state before the first step: nested dictionaries of arrays.

        Args:
          axes: the logical axes (tuples of names) of the parameters.
        """
        if hasattr(self, "set_param_axes"):
            self.set_param_axes(axes)
        return flax.serialization.to_state_dict(self.init_state(params).param_states)

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        """Return the logical axes of every array of the state, so that it is sharded like the parameters."""
        return optax_state.state_axes(jax.eval_shape(lambda p: self.init(p, axes), params), params, axes)

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return (new parameters, new state). `step` counts from 0; `learning_rate` is the trainer's."""
        template = jax.eval_shape(self.init_state, params).param_states
        before = OptimizerState(step, flax.serialization.from_state_dict(template, state))
        hyper_params = self.update_hyper_params(learning_rate=learning_rate)
        new_params, after = self.apply_gradient(hyper_params, params, before, grads)
        return new_params, flax.serialization.to_state_dict(after.param_states)


@flax.struct.dataclass
class HyperParams:
    """What a call of `apply_gradient` may override."""

    learning_rate: Any = None


class TreeOptimizer(OptimizerDef):
    """The base class of our optimizers: they define `init`, `state_axes` and `update`, and get T5X's methods here."""

    _param_axes: Tree = None

    @property
    def hyper_params(self) -> HyperParams:
        return HyperParams(getattr(self, "learning_rate", None))

    def set_param_axes(self, param_logical_axes: Tree) -> None:
        """Set the logical axes of the parameters, for T5X's methods."""
        self._param_axes = jax.tree.map(tuple, param_logical_axes, is_leaf=lambda x: not isinstance(x, Mapping))

    def _axes_of(self, params: Tree) -> Tree:
        return jax.tree.map(lambda _: None, params) if self._param_axes is None else self._param_axes

    def init_state(self, params: Tree) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), self.init(params, self._axes_of(params)))

    def apply_gradient(
        self, hyper_params: HyperParams, params: Tree, state: OptimizerState, grads: Tree
    ) -> tuple[Tree, OptimizerState]:
        axes, rate = self._axes_of(params), hyper_params.learning_rate
        new, states = self.update(grads, state.param_states, params, axes, step=state.step, learning_rate=rate)
        return new, OptimizerState(state.step + 1, states)

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Tree) -> Optimizer:
        """Return the optimizer with logical axes in the place of arrays, and None for the step."""
        axes = jax.tree.map(tuple, param_logical_axes, is_leaf=lambda x: not isinstance(x, Mapping))
        return Optimizer(self, OptimizerState(None, self.state_axes(optimizer.target, axes)), param_logical_axes)


OptimizerType, OptimizerDefType = Optimizer, OptimizerDef  # T5X's names in annotations


def trained(optimizer: OptimizerDef, tree: Tree) -> Tree:
    """Return the part of a tree of parameters, or of their gradients, that the optimizer changes."""
    select = getattr(optimizer, "trained", None)
    return tree if select is None else select(tree)
