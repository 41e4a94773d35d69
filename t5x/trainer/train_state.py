"""The state of training: parameters, optimizer state and the number of steps, with T5X's methods."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import flax.core
import flax.struct
import jax
import jax.numpy as jnp

from t5x.network import logical_axes
from t5x.optimizers.protocol import Optimizer, OptimizerDef, OptimizerState, as_specs, like

Tree = Any


class TrainState:
    """An immutable tree of arrays; without an optimizer, which `FlaxOptimTrainState` adds.

    Attributes:
      params_axes: logical axes of the parameters: the network's collection `params_axes`.
      flax_mutables: the network's other collections, and `fp8`, the amax history of FP8 training.
      flax_mutables_axes: logical axes of `flax_mutables`.
    """

    step: Any
    params: Tree
    params_axes: Tree
    flax_mutables: Tree
    flax_mutables_axes: Tree

    @property
    def optimizer_def(self) -> OptimizerDef | None:
        return None

    @property
    def param_states(self) -> Tree:
        return {}

    def replace(self, **updates: Any) -> Self:
        """Return the state with other values of its fields; `flax.struct.dataclass` defines it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state as stored in a checkpoint, with T5X's names."""
        mutables = flax.core.unfreeze(self.flax_mutables)
        return self._arrays() | ({"flax_mutables": mutables} if mutables else {})

    def _arrays(self) -> dict[str, Any]:
        return {"target": flax.core.unfreeze(self.params), "state": {"step": self.step}}

    def restore_state(self, state_dict: Mapping[str, Any]) -> "TrainState":
        """Return the state with the content of a `state_dict`."""
        mutables = like(self.flax_mutables, state_dict.get("flax_mutables", {}))
        params = like(self.params, state_dict["target"])
        return self.replace(step=state_dict["state"]["step"], params=params, flax_mutables=mutables)

    def replace_params(self, params: Tree) -> "TrainState":
        return self.replace(params=params)

    def replace_step(self, step: jax.Array) -> "TrainState":
        return self.replace(step=step)

    def apply_gradient(
        self, grads: Tree, learning_rate: jax.Array | float, flax_mutables: Tree | None = None
    ) -> "TrainState":
        raise NotImplementedError("This state has no optimizer: create a FlaxOptimTrainState to train.")

    def as_logical_axes(self) -> "TrainState":
        """Return the state with the logical axes of its arrays, and None for the step."""
        params, mutables = as_specs(self.logical_axes()), as_specs(self.flax_mutables_axes or {})
        return self.replace(step=None, params=params, params_axes=None, flax_mutables=mutables, flax_mutables_axes=None)

    def replace_flax_mutables(self, flax_mutables: Tree) -> "TrainState":
        return self.replace(flax_mutables=flax_mutables)

    def logical_axes(self) -> Tree:
        """Return the logical axes of every parameter: tuples of names, or None."""
        return logical_axes({"params": self.params, "params_axes": self.params_axes or {}})


@flax.struct.dataclass
class FlaxOptimTrainState(TrainState):
    """The state of a training run: parameters, optimizer state and step."""

    _optimizer: Optimizer
    params_axes: Tree = None
    flax_mutables: Tree = flax.struct.field(default_factory=dict)
    flax_mutables_axes: Tree = None

    @classmethod
    def create(cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]) -> "FlaxOptimTrainState":
        """Return the initial state of a network's variables."""
        params, params_axes, mutables, mutables_axes = split_variables(model_variables)
        axes = logical_axes({"params": params, "params_axes": params_axes or {}})
        state = OptimizerState(jnp.zeros((), jnp.int32), optimizer_def.init_param_states(params, axes))
        return cls(Optimizer(optimizer_def, state, params), params_axes, mutables, mutables_axes)

    @property
    def step(self) -> jax.Array:
        return self._optimizer.state.step

    @property
    def params(self) -> Tree:
        return self._optimizer.target

    @property
    def param_states(self) -> Tree:
        return self._optimizer.state.param_states

    def _arrays(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    @property
    def optimizer_def(self) -> OptimizerDef:
        return self._optimizer.optimizer_def

    def restore_state(self, state_dict: Mapping[str, Any]) -> "FlaxOptimTrainState":
        mutables = like(self.flax_mutables, state_dict.get("flax_mutables", {}))
        return self.replace(_optimizer=self._optimizer.restore_state(state_dict), flax_mutables=mutables)

    def replace_params(self, params: Tree) -> "FlaxOptimTrainState":
        return self.replace(_optimizer=dataclasses.replace(self._optimizer, target=params))

    def replace_step(self, step: jax.Array) -> "FlaxOptimTrainState":
        state = dataclasses.replace(self._optimizer.state, step=step)
        return self.replace(_optimizer=dataclasses.replace(self._optimizer, state=state))

    def apply_gradient(
        self, grads: Tree, learning_rate: jax.Array | float, flax_mutables: Tree | None = None
    ) -> "FlaxOptimTrainState":
        """Return the state after one step of the optimizer; the mutables are those passed, or empty."""
        params, states = self.optimizer_def.take_step(
            grads, self.param_states, self.params, self.logical_axes(), step=self.step, learning_rate=learning_rate
        )
        state = OptimizerState(self.step + 1, states)
        optimizer = dataclasses.replace(self._optimizer, target=params, state=state)
        return self.replace(_optimizer=optimizer, flax_mutables=flax_mutables or {})

    def as_logical_axes(self) -> "FlaxOptimTrainState":
        optimizer = self.optimizer_def.derive_logical_axes(self._optimizer, as_specs(self.logical_axes()))
        return type(self)(optimizer, flax_mutables=as_specs(self.flax_mutables_axes or {}), flax_mutables_axes=None)


@flax.struct.dataclass
class InferenceState(TrainState):
    """A state without an optimizer."""

    step: jax.Array | None
    params: Tree
    params_axes: Tree = None
    flax_mutables: Tree = flax.struct.field(default_factory=dict)
    flax_mutables_axes: Tree = None

    @classmethod
    def create(cls, model_variables: Mapping[str, Any]) -> "InferenceState":
        """Return the initial state of a network's variables."""
        return cls(jnp.zeros((), jnp.int32), *split_variables(model_variables))


def split_variables(variables: Mapping[str, Any]) -> tuple[Tree, Tree, Tree, Tree]:
    """Return the parameters of a network, their axes, its other collections and the axes of those.

    They are FrozenDicts if the variables are one.
    """
    others = {name: tree for name, tree in variables.items() if name not in ("params", "params_axes")}
    axes = {name.removesuffix("_axes"): tree for name, tree in others.items() if name.endswith("_axes")}
    mutables = {name: tree for name, tree in others.items() if not name.endswith("_axes")}
    mutables_axes = like(variables, axes) if axes else None
    return variables["params"], variables.get("params_axes"), like(variables, mutables), mutables_axes
