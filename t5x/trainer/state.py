"""The training state and its layout over the mesh."""

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x.checkpoints.tree import parameter_table
from t5x.models import BaseTransformerModel
from t5x.network import logical_axes
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

Tree = Any


@flax.struct.dataclass
class TrainState:
    """Parameters, optimizer state and the number of steps taken.

    Attributes:
      flax_mutables: other state of the network: `fp8`, the amax history of training in FP8; {} without it.
    """

    step: jax.Array
    params: Tree
    param_states: Tree
    flax_mutables: Tree = flax.struct.field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """Return the tree as stored in a checkpoint, with T5X's names."""
        tree = {"target": self.params, "state": {"step": self.step, "param_states": self.param_states}}
        return tree | ({"flax_mutables": self.flax_mutables} if self.flax_mutables else {})

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "TrainState":
        return cls(
            tree["state"]["step"], tree["target"], tree["state"]["param_states"], tree.get("flax_mutables", {})
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Shapes, logical axes and shardings of a model's state, without allocating it.

    Attributes:
      abstract: a TrainState of `jax.ShapeDtypeStruct` with shardings.
      axes: logical axes of every parameter.
    """

    model: BaseTransformerModel
    partitioner: PjitPartitioner
    input_shapes: Mapping[str, tuple[int, ...]]
    abstract: TrainState
    axes: Tree
    state_axes: Tree

    @classmethod
    def of(
        cls, model: BaseTransformerModel, partitioner: PjitPartitioner, input_shapes: Mapping[str, tuple[int, ...]]
    ) -> "StateLayout":
        variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), input_shapes))
        axes = logical_axes(variables)
        params = variables["params"]
        optimizer = model.optimizer_def
        states = {} if optimizer is None else jax.eval_shape(lambda p: optimizer.init(p, axes), params)
        state_axes = {} if optimizer is None else optimizer.state_axes(params, axes)

        def placed(x, a):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=partitioner.sharding(x.shape, a))

        abstract = TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=partitioner.replicated),
            params=jax.tree.map(placed, params, axes),
            param_states=jax.tree.map(placed, states, state_axes),
            flax_mutables=jax.tree.map(lambda x: placed(x, None), jax.eval_shape(lambda: _mutables(model))),
        )
        layout = cls(model, partitioner, input_shapes, abstract, axes, state_axes)
        layout._log_undivided()
        return layout

    def _log_undivided(self) -> None:
        leaves, treedef = jax.tree.flatten(self.abstract.params)
        axes = treedef.flatten_up_to(self.axes)
        reasons = Counter(self.partitioner.undivided(x.shape, a) for x, a in zip(leaves, axes, strict=True))
        for reason, count in reasons.items():
            if reason:
                log.warning("%d parameter(s) are not divided over that mesh axis: %s", count, reason)

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract)

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.abstract.params))

    def tree_axes(self) -> dict[str, Any]:
        """Return the logical axes under the names used in a checkpoint."""
        return {"target": self.axes, "state": {"step": (), "param_states": self.state_axes}}

    def step_array(self, step: int) -> jax.Array:
        return jax.make_array_from_callback((), self.partitioner.replicated, lambda _: np.asarray(step, np.int32))

    def with_fresh_optimizer(self, params: Tree, step: int) -> TrainState:
        """Return a state with the given parameters and a fresh optimizer state."""
        fresh = self.partitioner.partition(
            self._init_optimizer,
            in_shardings=(self.shardings.params,),
            out_shardings=self.shardings.param_states,
        )
        return TrainState(self.step_array(step), params, fresh(params), self.fresh_mutables())

    def fresh_mutables(self) -> Tree:
        """Return the initial `flax_mutables`, created on their devices."""
        shardings = self.shardings.flax_mutables
        return self.partitioner.partition(lambda: _mutables(self.model), in_shardings=(), out_shardings=shardings)()

    def init(self, rng: jax.Array) -> TrainState:
        """Return fresh parameters and optimizer state, created on their devices."""

        def fresh(rng):
            params = self.model.get_initial_variables(rng, self.input_shapes)["params"]
            return TrainState(jnp.zeros((), jnp.int32), params, self._init_optimizer(params), _mutables(self.model))

        return self.partitioner.partition(
            fresh, in_shardings=self.partitioner.replicated, out_shardings=self.shardings
        )(rng)

    def _init_optimizer(self, params: Tree) -> Tree:
        optimizer = self.model.optimizer_def
        return {} if optimizer is None else optimizer.init(params, self.axes)


def _mutables(model: BaseTransformerModel) -> Tree:
    initial_history = getattr(model, "initial_fp8_history", dict)  # a model need not derive from ours
    history = {} if model.optimizer_def is None else initial_history()
    return {"fp8": history} if history else {}


def write_model_info(directory: str, layout: StateLayout) -> None:
    """Write model-info.txt: the parameters, the optimizer state if there is one, and how they are sharded."""
    shardings = layout.shardings
    lines = parameter_table(
        layout.abstract.params, layout.axes, shardings.params, optimizer_state=layout.abstract.param_states or None,
        optimizer_axes=layout.state_axes, optimizer_specs=shardings.param_states,
    )  # fmt: skip
    text = "\n".join([f"Mesh: {layout.partitioner}", "", *lines]) + "\n"
    jsonl.replace(os.path.join(directory, "model-info.txt"), [text.encode()])
