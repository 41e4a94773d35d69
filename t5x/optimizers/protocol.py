"""What the trainer asks of an optimizer."""

from typing import Any, Protocol

import jax

Tree = Any


class Optimizer(Protocol):
    """Pure functions over trees of parameters.

    `axes` is always the tree of logical axes (tuples of names) of the parameters. An optimizer may have more:
    `learning_rate_fn`, where it applies a learning rate of its own, and `count(state)` for the steps that rate has seen
    (see `rates.py`); `trained(tree)`, where it leaves some parameters alone.
    """

    def init(self, params: Tree, axes: Tree) -> Tree:
        """The optimizer's state before the first step: nested dictionaries of arrays."""

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        """The logical axes of every array of the state, so that it can be laid out like the parameters."""

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """(new parameters, new state). `step` counts from 0; `learning_rate` is the trainer's."""


def trained(optimizer: Optimizer, tree: Tree) -> Tree:
    """The part of a tree of parameters (or of their gradients) that the optimizer changes."""
    select = getattr(optimizer, "trained", None)
    return tree if select is None else select(tree)
