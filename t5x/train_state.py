"""The state of training: parameters, optimizer state and the number of steps, with T5X's methods."""

from collections.abc import Mapping
from typing import Any

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x.network import logical_axes
from t5x.optimizers.protocol import Optimizer, OptimizerDef, OptimizerState

Tree = Any


class TrainState:
    """What `FlaxOptimTrainState` and `InferenceState` have in common: an immutable tree of arrays."""

    step: Any
    params: Tree
    param_states: Tree
    flax_mutables: Tree

    def state_dict(self) -> dict[str, Any]:
        """Return the state as stored in a checkpoint, with T5X's names."""
        tree = {"target": self.params, "state": self._state()}
        return tree | ({"flax_mutables": self.flax_mutables} if self.flax_mutables else {})

    def _state(self) -> dict[str, Any]:
        return {"step": self.step}

    def restore_state(self, state_dict: Mapping[str, Any]) -> "TrainState":
        """Return the state with the content of a `state_dict`."""
        raise NotImplementedError

    def replace_params(self, params: Tree) -> "TrainState":
        raise NotImplementedError

    def replace_step(self, step: jax.Array) -> "TrainState":
        raise NotImplementedError

    def apply_gradient(
        self, grads: Tree, learning_rate: jax.Array | float, flax_mutables: Tree | None = None
    ) -> "TrainState":
        raise NotImplementedError

    def as_logical_axes(self) -> "TrainState":
        raise NotImplementedError

    def replace_flax_mutables(self, flax_mutables: Tree) -> "TrainState":
        return self.replace(flax_mutables=flax_mutables)

    def logical_axes(self) -> Tree:
        """Return the logical axes of every parameter: tuples of names, or None."""
        return logical_axes({"params": self.params, "params_axes": self.params_axes or {}})


@flax.struct.dataclass
class FlaxOptimTrainState(TrainState):
    """A state with an optimizer.

    Attributes:
      params_axes: logical axes of the parameters, as the network's collection `params_axes` has them.
      flax_mutables: other collections of the network; and `fp8`, the amax history of training in FP8.
      flax_mutables_axes: their logical axes.
    """

    _optimizer: Optimizer
    params_axes: Tree = None
    flax_mutables: Tree = flax.struct.field(default_factory=dict)
    flax_mutables_axes: Tree = None

    @classmethod
    def create(cls, optimizer_def: OptimizerDef, model_variables: Mapping[str, Any]) -> "FlaxOptimTrainState":
        """Return the initial state of a network's variables."""
        params, params_axes, mutables, mutables_axes = split_variables(model_variables)
        axes = logical_axes({"params": params, "params_axes": params_axes or {}})
        state = OptimizerState(jnp.zeros((), jnp.int32), optimizer_def.init(params, axes))
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

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "param_states": self.param_states}

    @property
    def optimizer_def(self) -> OptimizerDef:
        return self._optimizer.optimizer_def

    def restore_state(self, state_dict: Mapping[str, Any]) -> "FlaxOptimTrainState":
        states = state_dict["state"]
        state = OptimizerState(states["step"], states.get("param_states", {}))
        optimizer = self._optimizer.replace(target=state_dict["target"], state=state)
        return self.replace(_optimizer=optimizer, flax_mutables=state_dict.get("flax_mutables", {}))

    def replace_params(self, params: Tree) -> "FlaxOptimTrainState":
        return self.replace(_optimizer=self._optimizer.replace(target=params))

    def replace_step(self, step: jax.Array) -> "FlaxOptimTrainState":
        return self.replace(_optimizer=self._optimizer.replace(state=self._optimizer.state.replace(step=step)))

    def apply_gradient(
        self, grads: Tree, learning_rate: jax.Array | float, flax_mutables: Tree | None = None
    ) -> "FlaxOptimTrainState":
        """Return the state after one step of the optimizer; mutables are replaced by those given, or emptied."""
        params, param_states = self.optimizer_def.update(
            grads, self.param_states, self.params, self.logical_axes(), step=self.step, learning_rate=learning_rate
        )
        state = OptimizerState(self.step + 1, param_states)
        optimizer = self._optimizer.replace(target=params, state=state)
        return self.replace(_optimizer=optimizer, flax_mutables=flax_mutables or {})

    def as_logical_axes(self) -> "FlaxOptimTrainState":
        """Return the state with the logical axes of its arrays, and None for the step."""
        axes = self.logical_axes()
        state = OptimizerState(None, _as_specs(self.optimizer_def.state_axes(self.params, axes)))
        optimizer = self._optimizer.replace(target=_as_specs(axes), state=state)
        return type(self)(optimizer, flax_mutables=_as_specs(self.flax_mutables_axes or {}), flax_mutables_axes=None)


@flax.struct.dataclass
class InferenceState(TrainState):
    """A state without an optimizer; see `FlaxOptimTrainState`."""

    step: jax.Array | None
    params: Tree
    params_axes: Tree = None
    flax_mutables: Tree = flax.struct.field(default_factory=dict)
    flax_mutables_axes: Tree = None

    @classmethod
    def create(cls, model_variables: Mapping[str, Any]) -> "InferenceState":
        """Return the initial state of a network's variables."""
        return cls(jnp.zeros((), jnp.int32), *split_variables(model_variables))

    @property
    def param_states(self) -> Tree:
        return {}

    def restore_state(self, state_dict: Mapping[str, Any]) -> "InferenceState":
        step, mutables = state_dict["state"]["step"], state_dict.get("flax_mutables", {})
        return self.replace(step=step, params=state_dict["target"], flax_mutables=mutables)

    def replace_params(self, params: Tree) -> "InferenceState":
        return self.replace(params=params)

    def replace_step(self, step: jax.Array) -> "InferenceState":
        return self.replace(step=step)

    def apply_gradient(self, *args: Any, **kwargs: Any) -> "InferenceState":
        raise NotImplementedError("An InferenceState has no optimizer: create a FlaxOptimTrainState to train.")

    def as_logical_axes(self) -> "InferenceState":
        """Return the state with the logical axes of its arrays, and None for the step."""
        mutables = _as_specs(self.flax_mutables_axes or {})
        return type(self)(None, _as_specs(self.logical_axes()), flax_mutables=mutables, flax_mutables_axes=None)


def split_variables(variables: Mapping[str, Any]) -> tuple[Tree, Tree, Tree, Tree]:
    """Return the parameters of a network, their axes, its other collections and the axes of those."""
    variables = flax.core.unfreeze(variables)
    params, axes = variables.pop("params"), variables.pop("params_axes", None)
    mutables_axes = {name.removesuffix("_axes"): tree for name, tree in variables.items() if name.endswith("_axes")}
    mutables = {name: tree for name, tree in variables.items() if not name.endswith("_axes")}
    return params, axes, mutables, mutables_axes or None


def _as_specs(tree: Tree) -> Tree:
    """Return PartitionSpecs in the place of axes, which are tuples or `AxisMetadata`; None stays."""

    def spec(axes: Any) -> PartitionSpec | None:
        return None if axes is None else PartitionSpec(*getattr(axes, "names", axes))

    return jax.tree.map(spec, tree, is_leaf=lambda x: not isinstance(x, Mapping))
