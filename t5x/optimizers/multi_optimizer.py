"""Groups of parameters: an optimizer for each, frozen ones, without weight decay; and global gradient clipping."""

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.traverse_util
import jax
import optax

from t5x._runtime.errors import UserError
from t5x.optimizers.protocol import OptimizerDef, TreeOptimizer, path_of, paths_in, select, trained, updated
from t5x.optimizers.schedules import Schedule, unknown_rate

log = logging.getLogger(__name__)

Tree = Any


class Patterns:
    """Regular expressions over parameter paths such as `encoder/layers_0/mlp/wi_0/kernel`.

    A pattern must match the whole path, and every pattern must match at least one parameter.

    Args:
      patterns: regular expressions, or a single one.
      setting: gin name of the setting, for error messages.

    Raises:
      UserError: if a pattern is not a regular expression.
    """

    def __init__(self, patterns: str | Sequence[str], setting: str):
        self._setting = setting
        self._compiled: list[re.Pattern[str]] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            try:
                self._compiled.append(re.compile(pattern))
            except (re.error, TypeError) as error:
                raise UserError(f"{setting}: {pattern!r} is not a regular expression: {error}.") from error

    def match(self, path: str) -> int | None:
        """Return the index of the first pattern that matches, or None."""
        return next((n for n, pattern in enumerate(self._compiled) if pattern.fullmatch(path)), None)

    def check(self, paths: Iterable[str]) -> None:
        """Raise a UserError if a pattern matches none of the paths."""
        paths = list(paths)
        for pattern in self._compiled:
            if not any(map(pattern.fullmatch, paths)):
                raise UserError(
                    f"{self._setting}: {pattern.pattern!r} matches no parameter. A pattern must match the whole path; "
                    f"the closest paths are {', '.join(_closest(pattern.pattern, paths))}."
                )


def _closest(pattern: str, paths: Sequence[str]) -> list[str]:
    plain = re.sub(r"\\d|[\\^$]|\.[*+]\??", "", pattern)
    containing = [path for path in paths if plain.strip("/") in path]
    return containing[:3] or difflib.get_close_matches(plain, paths, cutoff=0)


class MultiOptimizer(TreeOptimizer):
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
      traversals_and_optimizers: T5X's pairs of a `flax.traverse_util.ModelParamTraversal` and an optimizer. The first
        match counts; parameters that no traversal matches are frozen.
      patterns_and_optimizers: pairs of a regular expression that matches whole parameter paths, and their optimizer, or
        None. The first match counts. Every parameter must be matched, and every pattern must match a parameter.

    Attributes:
      learning_rate_fn: the rate that is logged: None (the trainer's) if it drives any of the optimizers, otherwise that
        of the first optimizer whose rate is known.

    Raises:
      UserError: if a pattern is invalid or nothing would be trained.
    """

    _setting = "optimizers.MultiOptimizer.patterns_and_optimizers"

    def __init__(
        self,
        traversals_and_optimizers: Sequence[tuple[Any, OptimizerDef]] = (),
        patterns_and_optimizers: Sequence[tuple[str, OptimizerDef | None]] = (),
    ):
        pairs = [*traversals_and_optimizers, *patterns_and_optimizers]
        if all(isinstance(pattern, str) for pattern, _ in pairs):
            self._patterns: Patterns | _Traversals = Patterns([pattern for pattern, _ in pairs], self._setting)
        else:
            self._patterns = _Traversals([traversal for traversal, _ in pairs])
            pairs.append((None, None))
        self._of_pattern = [optimizer for _, optimizer in pairs]
        unique = {id(optimizer): optimizer for optimizer in self._of_pattern if optimizer is not None}
        self._optimizers: list[OptimizerDef] = list(unique.values())
        if not self._optimizers:
            raise UserError(f"{self._setting} has no optimizer, so nothing would be trained. Add one, e.g. for '.*'.")
        rates = [getattr(optimizer, "learning_rate_fn", None) for optimizer in self._optimizers]
        driven = [number for number, rate in enumerate(rates) if rate is None]
        known = [number for number, rate in enumerate(rates) if rate is not unknown_rate]
        self._logged = (driven or known or [0])[0]
        self.learning_rate_fn: Schedule | None = rates[self._logged]
        if len(set(rates)) > 1:
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
        """Take one step with each optimizer; see `t5x.optimizers.OptimizerDef`."""
        step_args = {"step": step, "learning_rate": learning_rate}
        new_params, new_states = params, []
        for number, optimizer in enumerate(self._optimizers):
            its_grads, its_params, its_axes = self._parts(optimizer, grads, params, axes)
            its_state = self._state_of(number, state)
            its_params, its_state = updated(optimizer, its_grads, its_state, its_params, its_axes, **step_args)
            new_params = _replace_leaves(new_params, its_params)
            new_states.append(its_state)
        return new_params, self._join(new_states)

    def _optimizer_of(self, path: str) -> OptimizerDef | None:
        number = self._patterns.match(path)
        if number is None:
            raise UserError(f"{self._setting}: no pattern matches the parameter {path}. Add a last pair ('.*', …).")
        return self._of_pattern[number]

    def _parts(self, optimizer: OptimizerDef, *trees: Tree) -> list[Tree]:
        return [select(tree, lambda path: self._optimizer_of(path) is optimizer) for tree in trees]

    def _check(self, params: Tree) -> None:
        self._patterns.check(paths_in(params))
        if not self.trained(params):
            raise UserError(f"{self._setting}: every parameter is frozen, so nothing would be trained.")

    def _join(self, states: Sequence[Tree]) -> Tree:
        return states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}

    def _state_of(self, number: int, state: Tree) -> Tree:
        return state if len(self._optimizers) == 1 else state.get(str(number), {})


class _Traversals:
    """Traversals of Flax with the interface of `Patterns`; what none matches gets the last optimizer, which is None."""

    def __init__(self, traversals: Sequence[Any]):
        for traversal in traversals:
            if not isinstance(traversal, flax.traverse_util.ModelParamTraversal):
                raise UserError(
                    f"optimizers.MultiOptimizer.traversals_and_optimizers: {traversal!r} is not a "
                    "flax.traverse_util.ModelParamTraversal. Or use patterns_and_optimizers, with regular expressions."
                )
        self._traversals = list(traversals)

    def match(self, path: str) -> int:
        tree = flax.traverse_util.unflatten_dict({path: 0}, sep="/")
        matches = (number for number, t in enumerate(self._traversals) if list(t.iterate(tree)))
        return next(matches, len(self._traversals))

    def check(self, paths: Sequence[str]) -> None:
        """Accept anything: a traversal may match nothing."""


def _replace_leaves(tree: Tree, part: Tree) -> Tree:
    """Replace the leaves of `tree` that `part` has too."""
    flat, new = (flax.traverse_util.flatten_dict(t, keep_empty_nodes=True) for t in (tree, part))
    return flax.traverse_util.unflatten_dict(flat | new)


class _FrozenOptimizer(MultiOptimizer):
    _setting = "optimizers.freeze.patterns"


def freeze(optimizer: OptimizerDef, patterns: Sequence[str]) -> OptimizerDef:
    """Return an optimizer that leaves some parameters bitwise unchanged and has no state for them.

    The state of the other parameters is stored as without freezing.

    Args:
      optimizer: optimizer of the other parameters.
      patterns: regular expressions that match whole paths of the frozen parameters, e.g. `token_embedder/.*`.

    Raises:
      UserError: if a pattern is invalid; `init` raises it if a pattern matches no parameter.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return _FrozenOptimizer(patterns_and_optimizers=[*((p, None) for p in patterns), (".*", optimizer)])


class _ClippedOptimizer(TreeOptimizer):
    def __init__(self, optimizer: OptimizerDef, max_norm: float):
        self._optimizer = optimizer
        self._clip = optax.clip_by_global_norm(max_norm)
        self.learning_rate_fn = getattr(optimizer, "learning_rate_fn", None)
        self.count = getattr(optimizer, "count", None)

    def init(self, params: Tree, axes: Tree) -> Tree:
        return self._optimizer.init(params, axes)

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        return self._optimizer.state_axes(params, axes)

    def trained(self, tree: Tree) -> Tree:
        return trained(self._optimizer, tree)

    def update(self, grads: Tree, state: Tree, params: Tree, axes: Tree, **step_args: Any) -> tuple[Tree, Tree]:
        clipped, _ = self._clip.update(self.trained(grads), optax.EmptyState())
        return updated(self._optimizer, _replace_leaves(grads, clipped), state, params, axes, **step_args)


def clip_by_global_norm(optimizer: OptimizerDef, max_norm: float) -> OptimizerDef:
    """Return an optimizer that scales the gradients so that their global norm is at most `max_norm`.

    Frozen parameters are excluded from the norm.

    Args:
      optimizer: any optimizer; Adafactor and a chain of Optax transformations can also clip by themselves.
      max_norm: maximum global norm.
    """
    return _ClippedOptimizer(optimizer, max_norm)


def weight_decay_mask(exclude: Sequence[str]) -> Callable[[Tree], Tree]:
    """Return a mask that applies weight decay to all parameters except those that a pattern matches.

    Use it for `mask` or `weight_decay_mask` of Optax's optimizers, and `weight_decay_mask` of Adafactor:

        optax.adamw.mask = @optimizers.weight_decay_mask()
        optimizers.weight_decay_mask.exclude = ['.*/scale', '.*/rel_embedding']

    Args:
      exclude: patterns of parameters without weight decay.

    Returns:
      A function from a tree of parameters to the same tree of booleans.

    Raises:
      UserError: if a pattern is invalid; the mask raises it if a pattern matches no parameter.

    Example:
      >>> weight_decay_mask([".*/scale"])({"norm": {"scale": 1.0}, "mlp": {"kernel": 1.0}})
      {'mlp': {'kernel': True}, 'norm': {'scale': False}}
    """
    patterns = Patterns(exclude, "optimizers.weight_decay_mask.exclude")
    is_hole = lambda node: isinstance(node, optax.MaskedNode)

    def mask(params: Tree) -> Tree:
        if not any(map(is_hole, jax.tree.leaves(params, is_leaf=is_hole))):  # Optax also masks parts of the tree
            patterns.check(paths_in(params))
        return jax.tree_util.tree_map_with_path(lambda keys, _: patterns.match(path_of(keys)) is None, params)

    return mask
