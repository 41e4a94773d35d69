"""Optax's functions that remember the learning rate they were given.

A transformation of Optax does not tell its learning rate. Gin files that `import optax` get these functions (see
`t5x.configuration.imports`), so that the rate of `@optax.adamw()` is the one that is logged.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax


class Recorded(optax.GradientTransformationExtraArgs):
    """A transformation with the learning rates that are in it.

    Attributes:
      learning_rates: numbers or schedules.
    """

    learning_rates: list[Any]


@functools.cache
def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; a transformation that it returns is `Recorded`, if there is a rate in it or its arguments."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, optax.GradientTransformation):
            return result
        is_recorded = lambda node: isinstance(node, Recorded)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_recorded)
        rates = [rate for leaf in leaves if is_recorded(leaf) for rate in leaf.learning_rates]
        own = signature.bind(*args, **kwargs).arguments.get("learning_rate")
        if own is not None:
            rates.append(own)
        if not rates:
            return result
        result = Recorded(*optax.with_extra_args_support(result))
        result.learning_rates = rates
        return result

    call.__signature__ = signature  # gin looks for parameters without following __wrapped__
    return call


def rates_in(transformation: optax.GradientTransformation) -> list[Any]:
    """The learning rates that a transformation is known to have."""
    return transformation.learning_rates if isinstance(transformation, Recorded) else []
