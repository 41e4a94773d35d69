"""A decoding loop that rows leave when they have ended, so that a long output does not make all others wait with it.

Arrays of a compiled program have one size. So the loop is there twice: for all examples, and for the few that are left
once most have ended.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x.decoding import state as rows
from t5x.decoding.state import DecodingState, LogitCallback, TokensToLogits
from t5x.partitioning.logical import parts_of

_SHARE = 4  # of the examples, one in so many is left when the others have ended
_FEWEST = 8  # examples that are worth a loop of their own


@dataclasses.dataclass(frozen=True, eq=False)  # hashable, as a function is
class OfExamples:
    """A `tokens_to_logits` that sees something of each example besides the cache, and can do with fewer examples.

    Attributes:
      function: (seen, state) -> (logits, new cache).
      seen: a tree of arrays.
      axes: {"a key of `seen`": the axis of its arrays that counts examples}.
    """

    function: Callable[[dict[str, Any], DecodingState], tuple[jax.Array, Any]]
    seen: dict[str, Any]
    axes: dict[str, int]

    def __call__(self, state: DecodingState) -> tuple[jax.Array, Any]:
        return self.function(self.seen, state)

    def of(self, chosen: jax.Array) -> "OfExamples":
        """The same for some examples, int [n]."""
        take = lambda tree, axis: jax.tree.map(lambda x: jnp.take(x, chosen, axis), tree)
        return dataclasses.replace(self, seen={name: take(tree, self.axes[name]) for name, tree in self.seen.items()})


def of_examples(function: Callable, seen: dict[str, Any], axes: dict[str, int]) -> TokensToLogits:
    """`OfExamples`; a plain function where devices share a batch: rows would have to move between them."""
    return OfExamples(function, seen, axes) if parts_of("batch") == 1 else functools.partial(function, seen)


def of_any_rows(callback: LogitCallback) -> LogitCallback:
    """Marks a function that looks at the state alone, so that the rows of a batch may become fewer."""
    callback.of_any_rows = True
    return callback


def is_of_any_rows(callback: LogitCallback | None) -> bool:
    return callback is None or getattr(callback, "of_any_rows", False)


def loop(
    step: Callable[[TokensToLogits, Any, Any], Any],
    state: Any,
    *,
    tokens_to_logits: TokensToLogits,
    fixed: Any,
    is_open: Callable[[Any], jax.Array],
    results: Callable[[Any], Any],
    cache_rows: int,
    cache_axis: int,
    may_narrow: bool,
) -> Any:
    """Takes steps until no example is open, and gives the results of all.

    Args:
      step: (tokens_to_logits, fixed, state) -> state; with fewer examples, of a state with fewer.
      state: a dataclass with a `cache`; its other arrays have axes of rows first, a whole number for each example, or
        no axes at all.
      fixed: a tree of such arrays, which no step changes.
      is_open: state -> bool [examples].
      results: state -> a tree of arrays.
      cache_rows, cache_axis: rows that the cache has, and the axis that counts them.
      may_narrow: nothing else depends on the number of examples.
    """
    (examples,) = is_open(state).shape
    fewer = examples // _SHARE
    if not may_narrow or not isinstance(tokens_to_logits, OfExamples) or fewer < _FEWEST:
        return results(_while(step, state, tokens_to_logits, fixed, lambda state: jnp.any(is_open(state))))
    state = _while(step, state, tokens_to_logits, fixed, lambda state: jnp.sum(is_open(state)) > fewer)
    of_all = results(state)
    chosen = jnp.argsort(~is_open(state), stable=True)[:fewer]

    def take(x: jax.Array) -> jax.Array:
        return x if x.ndim == 0 else _grouped(x, examples)[chosen].reshape(-1, *x.shape[1:])

    take_cache = take
    for _ in range(cache_axis):
        take_cache = jax.vmap(take_cache)
    cache = rows.map_rows(take_cache, state.cache, cache_rows, cache_axis)
    state, fixed = jax.tree.map(take, (state.replace(cache=None), fixed))
    state = _while(
        step, state.replace(cache=cache), tokens_to_logits.of(chosen), fixed, lambda state: jnp.any(is_open(state))
    )  # fmt: skip

    def put(x: jax.Array, some: jax.Array) -> jax.Array:
        return _grouped(x, examples).at[chosen].set(_grouped(some, fewer)).reshape(x.shape)

    return jax.tree.map(put, of_all, results(state))


def _while(
    step: Callable, state: Any, tokens_to_logits: TokensToLogits, fixed: Any, go_on: Callable[[Any], jax.Array]
) -> Any:
    return jax.lax.while_loop(go_on, lambda state: step(tokens_to_logits, fixed, state), state)


def _grouped(x: jax.Array, examples: int) -> jax.Array:
    """[examples * n, ...] -> [examples, n, ...]."""
    return x.reshape(examples, -1, *x.shape[1:])
