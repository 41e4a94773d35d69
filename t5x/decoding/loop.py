"""The decoding loop. It continues with a smaller batch once most examples have finished.

Otherwise one long output would keep the whole batch running. A compiled program has fixed shapes, so the loop is
compiled twice: for all examples, and for the few that remain.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from t5x.decoding.state import LogitCallback, StateView, TokensToLogits, map_cache
from t5x.partitioning.logical import shards_of

_SHRINK_FACTOR = 4  # the second loop runs when at most 1 / _SHRINK_FACTOR of the examples are still open
_MIN_EXAMPLES = 8  # smallest batch that is worth compiling the second loop for


@dataclasses.dataclass(frozen=True, eq=False)  # hashable by identity, as jax.jit expects of a function
class PerExampleLogits:
    """A `tokens_to_logits` function with per-example inputs besides the cache, so that examples can be removed.

    Attributes:
      function: (inputs, state) -> (logits, new cache).
      inputs: a dict of trees of arrays.
      axes: {key of `inputs`: example axis of its arrays}.
    """

    function: Callable[[dict[str, Any], StateView], tuple[jax.Array, Any]]
    inputs: dict[str, Any]
    axes: dict[str, int]

    def __call__(self, state: StateView) -> tuple[jax.Array, Any]:
        return self.function(self.inputs, state)

    def take(self, examples: jax.Array) -> "PerExampleLogits":
        """Restrict the function to the examples int [n]."""

        def take(tree: Any, axis: int) -> Any:
            return jax.tree.map(lambda x: jnp.take(x, examples, axis), tree)

        return dataclasses.replace(self, inputs={name: take(x, self.axes[name]) for name, x in self.inputs.items()})


def per_example_logits(function: Callable, inputs: dict[str, Any], axes: dict[str, int]) -> TokensToLogits:
    """Return `PerExampleLogits`; a plain function if the batch is sharded, because rows cannot be removed then."""
    return PerExampleLogits(function, inputs, axes) if shards_of("batch") == 1 else functools.partial(function, inputs)


def with_constraint(tokens_to_logits: TokensToLogits, constraint: LogitCallback) -> TokensToLogits:
    """Return `tokens_to_logits` with a constraint on its logits, which comes before any other."""

    def constrained(function: Callable) -> Callable:
        def compute(*arguments: Any) -> tuple[jax.Array, Any]:
            logits, cache = function(*arguments)
            return constraint(logits.astype(jnp.float32), arguments[-1]), cache

        return compute

    if isinstance(tokens_to_logits, PerExampleLogits):
        return dataclasses.replace(tokens_to_logits, function=constrained(tokens_to_logits.function))
    return constrained(tokens_to_logits)


def row_independent(callback: LogitCallback) -> LogitCallback:
    """Mark a callback that depends on the state only, so that rows may be removed from the batch."""
    vars(callback)["row_independent"] = True
    return callback


def is_row_independent(callback: LogitCallback | None) -> bool:
    """Return whether `callback` is None or was marked by `row_independent`."""
    return callback is None or getattr(callback, "row_independent", False)


def decoding_loop(
    step: Callable[[TokensToLogits, Any, Any], Any],
    state: Any,
    *,
    tokens_to_logits: TokensToLogits,
    fixed: Any,
    is_open: Callable[[Any], jax.Array],
    results: Callable[[Any], Any],
    cache_rows: int,
    cache_axis: int,
    may_shrink: bool,
) -> Any:
    """Run steps until every example has finished, and return the results of all examples.

    Args:
      step: (tokens_to_logits, fixed, state) -> state, for any number of examples.
      state: a dataclass with a `cache`. Its other arrays are scalars, or have a leading axis of a multiple of the
        number of examples.
      fixed: a tree of such arrays that no step changes.
      is_open: state -> bool [examples].
      results: state -> a tree of arrays.
      cache_rows: number of rows in the cache.
      cache_axis: row axis of the cache.
      may_shrink: whether nothing else depends on the number of examples.
    """

    def run(state: Any, logits: TokensToLogits, fixed: Any, condition: Callable[[Any], jax.Array]) -> Any:
        return jax.lax.while_loop(condition, lambda state: step(logits, fixed, state), state)

    def any_open(state: Any) -> jax.Array:
        return jnp.any(is_open(state))

    def grouped(x: jax.Array, examples: int) -> jax.Array:  # [examples * n, ...] -> [examples, n, ...]
        return x.reshape(examples, -1, *x.shape[1:])

    (examples,) = is_open(state).shape
    may_shrink = may_shrink and not is_symbolic_dim(examples)
    fewer = examples // _SHRINK_FACTOR
    if not may_shrink or not isinstance(tokens_to_logits, PerExampleLogits) or fewer < _MIN_EXAMPLES:
        return results(run(state, tokens_to_logits, fixed, any_open))
    state = run(state, tokens_to_logits, fixed, lambda state: jnp.sum(is_open(state)) > fewer)
    all_results = results(state)
    chosen = jnp.argsort(~is_open(state), stable=True)[:fewer]

    def take(x: jax.Array) -> jax.Array:
        return x if x.ndim == 0 else grouped(x, examples)[chosen].reshape(-1, *x.shape[1:])

    take_cache = take
    for _ in range(cache_axis):
        take_cache = jax.vmap(take_cache)
    cache = map_cache(take_cache, state.cache, cache_rows, cache_axis)
    state, fixed = jax.tree.map(take, (state.replace(cache=None), fixed))
    state = run(state.replace(cache=cache), tokens_to_logits.take(chosen), fixed, any_open)

    def put(x: jax.Array, some: jax.Array) -> jax.Array:
        return grouped(x, examples).at[chosen].set(grouped(some, fewer)).reshape(x.shape)

    return jax.tree.map(put, all_results, results(state))
