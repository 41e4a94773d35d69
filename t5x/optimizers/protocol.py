"""The interface between the trainer and an optimizer."""

from typing import Any, Protocol

import jax

Tree = Any


class Optimizer(Protocol):
    """Pure functions over trees of parameters.

    `axes` is the tree of logical axes (tuples of names) of the parameters. An optimizer may also define
    `learning_rate_fn`, if it applies a learning rate of its own; `count(state)`, the number of steps which that rate
    has seen (see `learning_rates.py`); and `trained(tree)`, if it leaves some parameters unchanged.
    """

    def init(self, params: Tree, axes: Tree) -> Tree:
        """Return the state before the first step: nested dictionaries of arrays."""

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        """Return the logical axes of every array of the state, so that it is sharded like the parameters."""

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return (new parameters, new state). `step` counts from 0; `learning_rate` is the trainer's."""


def trained(optimizer: Optimizer, tree: Tree) -> Tree:
    """Return the part of a tree of parameters, or of their gradients, that the optimizer changes."""
    select = getattr(optimizer, "trained", None)
    return tree if select is None else select(tree)
