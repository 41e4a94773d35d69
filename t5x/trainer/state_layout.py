"""The training state and its layout over the mesh."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np

from t5x.checkpoints.tree import parameter_table
from t5x.models import BaseModel
from t5x.models.hooks import hooks_of
from t5x.optimizers.protocol import Optimizer, OptimizerDef, OptimizerState
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import jsonl
from t5x.trainer.train_state import FlaxOptimTrainState, InferenceState, TrainState, split_variables

log = logging.getLogger(__name__)

Tree = Any


class StateLayout:
    """Shapes, logical axes and shardings of a training state, without allocating it: T5X's TrainStateInitializer.

    Args:
      optimizer_def: the optimizer; None lays out an `InferenceState`.
      init_fn: `model.get_initial_variables`.
      input_shapes, input_types: its arguments, {feature: shape} and {feature: dtype} of a batch.
      partitioner: the mesh.

    Attributes:
      abstract: a TrainState of `jax.ShapeDtypeStruct` with shardings.
      train_state_axes: the same with PartitionSpecs, which the partitioner decides.
      axes: logical axes of every parameter.
      model: the model whose method `init_fn` is, if any.
    """

    def __init__(
        self,
        optimizer_def: OptimizerDef | None,
        init_fn: Callable[..., Any],
        input_shapes: Mapping[str, tuple[int, ...]],
        partitioner: PjitPartitioner,
        input_types: Mapping[str, Any] | None = None,
    ):
        self.model: BaseModel | None = getattr(init_fn, "__self__", None)
        self.partitioner, self.input_shapes = partitioner, input_shapes
        self._optimizer_def, self._init_fn, self._input_types = optimizer_def, init_fn, input_types
        variables = jax.eval_shape(lambda: self._variables(jax.random.key(0)))
        params, params_axes, _, _ = split_variables(variables)
        step = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
        mutables = jax.eval_shape(lambda: self._mutables(variables))
        state: TrainState = InferenceState(step, params, params_axes, mutables)
        self.axes = state.logical_axes()
        self.state_axes = {}
        if optimizer_def is not None:
            states = jax.eval_shape(lambda p: optimizer_def.init_param_states(p, self.axes), params)
            self.state_axes = optimizer_def.state_axes(params, self.axes)
            optimizer = Optimizer(optimizer_def, OptimizerState(step, states), params)
            state = FlaxOptimTrainState(optimizer, params_axes, mutables)

        self.train_state_axes = partitioner.get_mesh_axes(state)
        self.abstract: TrainState = jax.tree.map(
            lambda x, spec: x.update(sharding=partitioner.sharding_of(spec)), state, self.train_state_axes
        )
        self._log_undivided()

    @classmethod
    def of(
        cls,
        model: BaseModel,
        partitioner: PjitPartitioner,
        input_shapes: Mapping[str, tuple[int, ...]],
        input_types: Mapping[str, Any] | None = None,
    ) -> "StateLayout":
        """Return the layout of a model's state."""
        return cls(model.optimizer_def, model.get_initial_variables, input_shapes, partitioner, input_types)

    def _variables(self, rng: jax.Array) -> Any:
        types = {"input_types": self._input_types} if self._input_types is not None else {}
        return flax.core.unfreeze(self._init_fn(rng=rng, input_shapes=self.input_shapes, **types))

    def _log_undivided(self) -> None:
        undivided = lambda x, axes: self.partitioner.undivided(x.shape, axes)
        reasons = Counter(jax.tree.leaves(jax.tree.map(undivided, self.abstract.params, self.axes)))
        for reason, count in reasons.items():
            log.warning("%d parameter(s) are not divided over that mesh axis: %s", count, reason)

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract)

    @property
    def global_train_state_shape(self) -> TrainState:
        return self.abstract

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.abstract.params))

    def tree_axes(self) -> dict[str, Any]:
        """Return the logical axes under the names used in a checkpoint."""
        states = {} if self._optimizer_def is None else {"param_states": self.state_axes}
        return {"target": self.axes, "state": {"step": (), **states}}

    def state(self, step: int, params: Tree, param_states: Tree, flax_mutables: Tree) -> TrainState:
        """Return a state of this layout with these arrays."""
        step_array = jax.make_array_from_callback((), self.partitioner.replicated, lambda _: np.asarray(step, np.int32))
        state = {"step": step_array, "param_states": param_states}
        return self.abstract.restore_state({"target": params, "state": state, "flax_mutables": flax_mutables})

    def with_fresh_optimizer(self, params: Tree, step: int) -> TrainState:
        """Return a state with these parameters and a fresh optimizer state."""
        fresh = self.partitioner.partition(
            self._init_optimizer,
            in_axis_resources=(self.shardings.params,),
            out_axis_resources=self.shardings.state_dict()["state"].get("param_states", {}),
        )
        return self.state(step, params, fresh(params), self.fresh_mutables())

    def fresh_mutables(self) -> Tree:
        """Return the initial `flax_mutables`, created on their devices."""
        if not self.abstract.flax_mutables:
            return {}
        init = lambda: self._mutables(self._variables(jax.random.key(0)))
        return self.partitioner.partition(init, in_axis_resources=(), out_axis_resources=self.shardings.flax_mutables)()

    def init(self, rng: jax.Array) -> TrainState:
        """Return fresh parameters and optimizer state, created on their devices."""

        def fresh(rng):
            variables = self._variables(rng)
            params = split_variables(variables)[0]
            state = {"step": jnp.zeros((), jnp.int32), "param_states": self._init_optimizer(params)}
            tree = {"target": params, "state": state, "flax_mutables": self._mutables(variables)}
            return self.abstract.restore_state(tree)

        return self.partitioner.partition(
            fresh, in_axis_resources=self.partitioner.replicated, out_axis_resources=self.shardings
        )(rng)

    def _init_optimizer(self, params: Tree) -> Tree:
        return {} if self._optimizer_def is None else self._optimizer_def.init(params, self.axes)

    def _mutables(self, variables: Tree) -> Tree:
        """Return the other collections of the network, and the FP8 history of a model that is trained."""
        history = getattr(self.model, "initial_fp8_history", dict)
        history = history() if self._optimizer_def is not None else {}
        others = split_variables(variables)[2] if self.model is not None and hooks_of(self.model).takes_mutables else {}
        return others | ({"fp8": history} if history else {})


def write_run_info(
    directory: str, layout: StateLayout, summarize_config_fn: Callable | None, writer: Any = None, step: int = 0
) -> None:
    """Write the configuration, and model-info.txt: the parameters, the optimizer state, and how they are sharded.

    Args:
      summarize_config_fn: see `gin_utils.summarize_gin_config`, of which `writer` and `step` are arguments; None writes
        no configuration.
    """
    if summarize_config_fn is not None:
        summarize_config_fn(directory, writer, step)
    arrays, shardings = layout.abstract.state_dict(), layout.shardings.state_dict()
    lines = parameter_table(
        arrays["target"], layout.axes, shardings["target"], optimizer_state=arrays["state"].get("param_states"),
        optimizer_axes=layout.state_axes, optimizer_specs=shardings["state"].get("param_states"),
    )  # fmt: skip
    text = "\n".join([f"Mesh: {layout.partitioner}", "", *lines]) + "\n"
    jsonl.replace(os.path.join(directory, "model-info.txt"), [text.encode()])
