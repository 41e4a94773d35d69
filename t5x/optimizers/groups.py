"""Wrappers around optimizers: several of them by parameter, parameters left alone, gradients clipped together."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import optax

from t5x.errors import UserError
from t5x.optimizers import rates
from t5x.optimizers.patterns import Patterns, paths_in, select
from t5x.optimizers.protocol import Optimizer, trained
from t5x.schedules import Schedule

log = logging.getLogger(__name__)

Tree = Any


class MultiOptimizer:
    """Different optimizers for different parameters.

        optimizers.MultiOptimizer.patterns_and_optimizers = [
            ('token_embedder/.*', None),                        # frozen: stays as it is, bit for bit
            ('.*/scale', @optimizers.sgd()),
            ('.*', @adafactor.Adafactor()),
        ]

    The state of a single optimizer is stored as if it were alone; of several, each under its number (`0/…`, `1/…`).
    Frozen parameters have none. What an optimizer does with all gradients together (a global norm) it does with those
    of its own parameters; `clip_by_global_norm` goes around all of them. The trainer's schedule drives every optimizer
    that has no learning rate of its own, whatever the others have.

    Args:
      patterns_and_optimizers: pairs of a regular expression that matches whole paths of parameters, and their
        optimizer, or None. The first that matches decides; every parameter must be matched, and every pattern match
        some.

    Attributes:
      learning_rate_fn: the rate that is logged: None (the trainer's) if that drives any of the optimizers, otherwise
        that of the first that tells its own.
    """

    _setting = "optimizers.MultiOptimizer.patterns_and_optimizers"

    def __init__(self, patterns_and_optimizers: Sequence[tuple[str, Optimizer | None]]):
        self._patterns = Patterns([pattern for pattern, _ in patterns_and_optimizers], self._setting)
        self._of_pattern = [optimizer for _, optimizer in patterns_and_optimizers]
        self._optimizers: list[Optimizer] = []
        for optimizer in self._of_pattern:
            if optimizer is not None and not any(optimizer is other for other in self._optimizers):
                self._optimizers.append(optimizer)
        if not self._optimizers:
            raise UserError(f"{self._setting} has no optimizer: nothing would be trained.")
        found = [getattr(optimizer, "learning_rate_fn", None) for optimizer in self._optimizers]
        driven = [number for number, own in enumerate(found) if own is None]
        told = [number for number, own in enumerate(found) if own is not rates.unknown]
        self._logged = (driven or told or [0])[0]
        self.learning_rate_fn: Schedule | None = found[self._logged]
        if len(set(found)) > 1:
            whose = "the trainer's" if driven else f"that of optimizer {self._logged} (from 0)"
            log.info("the optimizers have learning rates of their own: the metric learning_rate is %s", whose)

    def count(self, state: Tree) -> int | None:
        counter = getattr(self._optimizers[self._logged], "count", None)
        return None if counter is None else counter(self._state_of(self._logged, state))

    def trained(self, tree: Tree) -> Tree:
        return select(tree, lambda path: self._optimizer_of(path) is not None)

    def init(self, params: Tree, axes: Tree) -> Tree:
        self._check(params)
        return self._joined([o.init(*self._parts(o, params, axes)) for o in self._optimizers])

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        self._check(params)
        return self._joined([o.state_axes(*self._parts(o, params, axes)) for o in self._optimizers])

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """One step of each; see `t5x.optimizers.Optimizer`."""
        new_params, new_states = params, []
        for number, optimizer in enumerate(self._optimizers):
            its_grads, its_params, its_axes = self._parts(optimizer, grads, params, axes)
            its_params, its_state = optimizer.update(
                its_grads, self._state_of(number, state), its_params, its_axes, step=step, learning_rate=learning_rate
            )
            new_params = _replaced(new_params, its_params)
            new_states.append(its_state)
        return new_params, self._joined(new_states)

    # -- who has what --------------------------------------------------------------------------------------------------

    def _optimizer_of(self, path: str) -> Optimizer | None:
        number = self._patterns.match(path)
        if number is None:
            raise UserError(
                f"{self._setting}: no pattern matches the parameter {path}. A last pair ('.*', …) takes what is left."
            )
        return self._of_pattern[number]

    def _parts(self, optimizer: Optimizer, *trees: Tree) -> list[Tree]:
        return [select(tree, lambda path: self._optimizer_of(path) is optimizer) for tree in trees]

    def _check(self, params: Tree) -> None:
        self._patterns.check(paths_in(params))
        if not self.trained(params):
            raise UserError(f"{self._setting}: every parameter is frozen, so that nothing would be trained.")

    def _joined(self, states: Sequence[Tree]) -> Tree:
        return states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}

    def _state_of(self, number: int, state: Tree) -> Tree:
        return state if len(self._optimizers) == 1 else state.get(str(number), {})


def _replaced(tree: Tree, part: Tree) -> Tree:
    """`tree` with the leaves of `part` in place of its own."""
    return {
        key: value if key not in part else _replaced(value, part[key]) if isinstance(value, dict) else part[key]
        for key, value in tree.items()
    }


class _Frozen(MultiOptimizer):
    _setting = "optimizers.freeze.patterns"


def freeze(optimizer: Optimizer, patterns: Sequence[str]) -> Optimizer:
    """An optimizer that leaves some parameters as they are, bit for bit, and has no state for them.

    The state of the others is stored as without freezing.

    Args:
      optimizer: of the other parameters.
      patterns: regular expressions that match whole paths of the frozen parameters: `token_embedder/.*`.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return _Frozen([*((pattern, None) for pattern in patterns), (".*", optimizer)])


class _Clipped:
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
        return self._optimizer.update(_replaced(grads, clipped), state, params, axes, **at)


def clip_by_global_norm(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """An optimizer whose gradients are scaled so that the norm of all of them together is at most `max_norm`.

    Frozen parameters do not count.

    Args:
      optimizer: any; a chain of Optax's and Adafactor can also clip by themselves.
    """
    return _Clipped(optimizer, max_norm)
