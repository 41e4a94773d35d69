"""Wrappers around optimizers: one per group of parameters, frozen parameters, and global gradient clipping."""

import logging
from collections.abc import Sequence
from typing import Any

import flax.traverse_util
import jax
import optax

from t5x.errors import UserError
from t5x.optimizers.learning_rates import unknown_rate
from t5x.optimizers.patterns import Patterns, paths_in, select
from t5x.optimizers.protocol import Optimizer, trained
from t5x.optimizers.schedules import Schedule

log = logging.getLogger(__name__)

Tree = Any


class MultiOptimizer:
    """Different optimizers for different parameters.

        optimizers.MultiOptimizer.patterns_and_optimizers = [
            ('token_embedder/.*', None),                        # frozen: stays bitwise unchanged
            ('.*/scale', @optimizers.sgd()),
            ('.*', @adafactor.Adafactor()),
        ]

    The state of a single optimizer is stored as if it were used alone; several are stored by number (`0/…`, `1/…`).
    Frozen parameters have no state. Operations over all gradients, such as a global norm, see the gradients of one
    optimizer; wrap `clip_by_global_norm` around the MultiOptimizer to clip all of them together. The trainer's schedule
    drives every optimizer without a learning rate of its own.

    Args:
      patterns_and_optimizers: pairs of a regular expression that matches whole parameter paths, and their optimizer, or
        None. The first match counts. Every parameter must be matched, and every pattern must match a parameter.

    Attributes:
      learning_rate_fn: the rate that is logged: None (the trainer's) if it drives any of the optimizers, otherwise that
        of the first optimizer whose rate is known.

    Raises:
      UserError: if a pattern is invalid or nothing would be trained.
    """

    _setting = "optimizers.MultiOptimizer.patterns_and_optimizers"

    def __init__(self, patterns_and_optimizers: Sequence[tuple[str, Optimizer | None]]):
        self._patterns = Patterns([pattern for pattern, _ in patterns_and_optimizers], self._setting)
        self._of_pattern = [optimizer for _, optimizer in patterns_and_optimizers]
        unique = {id(optimizer): optimizer for optimizer in self._of_pattern if optimizer is not None}
        self._optimizers: list[Optimizer] = list(unique.values())
        if not self._optimizers:
            raise UserError(f"{self._setting} has no optimizer, so nothing would be trained. Add one, e.g. for '.*'.")
        found = [getattr(optimizer, "learning_rate_fn", None) for optimizer in self._optimizers]
        driven = [number for number, own in enumerate(found) if own is None]
        known = [number for number, own in enumerate(found) if own is not unknown_rate]
        self._logged = (driven or known or [0])[0]
        self.learning_rate_fn: Schedule | None = found[self._logged]
        if len(set(found)) > 1:
            whose = "the trainer's" if driven else f"that of optimizer {self._logged} (counting from 0)"
            log.info("the optimizers have different learning rates: the metric learning_rate is %s", whose)

    def count(self, state: Tree) -> int | None:
        counter = getattr(self._optimizers[self._logged], "count", None)
        return None if counter is None else counter(self._state_of(self._logged, state))

    def trained(self, tree: Tree) -> Tree:
        return select(tree, lambda path: self._optimizer_of(path) is not None)

    def init(self, params: Tree, axes: Tree) -> Tree:
        self._check(params)
        return self._join([o.init(*self._parts(o, params, axes)) for o in self._optimizers])

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        self._check(params)
        return self._join([o.state_axes(*self._parts(o, params, axes)) for o in self._optimizers])

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """Take one step with each optimizer; see `t5x.optimizers.Optimizer`."""
        at = {"step": step, "learning_rate": learning_rate}
        new_params, new_states = params, []
        for number, optimizer in enumerate(self._optimizers):
            its_grads, its_params, its_axes = self._parts(optimizer, grads, params, axes)
            its_state = self._state_of(number, state)
            its_params, its_state = optimizer.update(its_grads, its_state, its_params, its_axes, **at)
            new_params = _replace_leaves(new_params, its_params)
            new_states.append(its_state)
        return new_params, self._join(new_states)

    def _optimizer_of(self, path: str) -> Optimizer | None:
        number = self._patterns.match(path)
        if number is None:
            raise UserError(f"{self._setting}: no pattern matches the parameter {path}. Add a last pair ('.*', …).")
        return self._of_pattern[number]

    def _parts(self, optimizer: Optimizer, *trees: Tree) -> list[Tree]:
        return [select(tree, lambda path: self._optimizer_of(path) is optimizer) for tree in trees]

    def _check(self, params: Tree) -> None:
        self._patterns.check(paths_in(params))
        if not self.trained(params):
            raise UserError(f"{self._setting}: every parameter is frozen, so nothing would be trained.")

    def _join(self, states: Sequence[Tree]) -> Tree:
        return states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}

    def _state_of(self, number: int, state: Tree) -> Tree:
        return state if len(self._optimizers) == 1 else state.get(str(number), {})


def _replace_leaves(tree: Tree, part: Tree) -> Tree:
    """Replace the leaves of `tree` that `part` has too."""
    flat, new = (flax.traverse_util.flatten_dict(t, keep_empty_nodes=True) for t in (tree, part))
    return flax.traverse_util.unflatten_dict(flat | new)


class _FrozenOptimizer(MultiOptimizer):
    _setting = "optimizers.freeze.patterns"


def freeze(optimizer: Optimizer, patterns: Sequence[str]) -> Optimizer:
    """Return an optimizer that leaves some parameters bitwise unchanged and has no state for them.

    The state of the other parameters is stored as without freezing.

    Args:
      optimizer: optimizer of the other parameters.
      patterns: regular expressions that match whole paths of the frozen parameters, e.g. `token_embedder/.*`.

    Raises:
      UserError: if a pattern is invalid; `init` raises it if a pattern matches no parameter.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return _FrozenOptimizer([*((pattern, None) for pattern in patterns), (".*", optimizer)])


class _ClippedOptimizer:
    def __init__(self, optimizer: Optimizer, max_norm: float):
        self._optimizer = optimizer
        self._clip = optax.clip_by_global_norm(max_norm)
        self.init, self.state_axes = optimizer.init, optimizer.state_axes
        self.learning_rate_fn = getattr(optimizer, "learning_rate_fn", None)
        self.count = getattr(optimizer, "count", None)

    def trained(self, tree: Tree) -> Tree:
        return trained(self._optimizer, tree)

    def update(self, grads: Tree, state: Tree, params: Tree, axes: Tree, **at: Any) -> tuple[Tree, Tree]:
        clipped, _ = self._clip.update(self.trained(grads), optax.EmptyState())
        return self._optimizer.update(_replace_leaves(grads, clipped), state, params, axes, **at)


def clip_by_global_norm(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """Return an optimizer that scales the gradients so that their global norm is at most `max_norm`.

    Frozen parameters are excluded from the norm.

    Args:
      optimizer: any optimizer; Adafactor and a chain of Optax transformations can also clip by themselves.
      max_norm: maximum global norm.
    """
    return _ClippedOptimizer(optimizer, max_norm)
