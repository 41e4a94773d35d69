"""Optax's transformations as optimizers of the trainer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from t5x.errors import UserError
from t5x.optimizers import rates, stored
from t5x.optimizers.rates import Rate
from t5x.optimizers.recorded import rates_in
from t5x.schedules import Schedule

Tree = Any
Make = Callable[[float | jax.Array, Tree], optax.GradientTransformation]


class OptaxWrapper:
    """Any transformation of Optax as an optimizer; its state is stored as in T5X and laid out like the parameters.

    Args:
      optax_optimizer: the transformation, with a learning rate of its own in it.
      learning_rate: that rate, a number or a schedule, for the log; needed where the transformation does not tell it
        (one made in Python by Optax; those of gin files do).

    Attributes:
      learning_rate_fn: the rate by the optimizer's own steps; None where the trainer's schedule drives it.
    """

    learning_rate_fn: Schedule | None

    def __init__(self, optax_optimizer: optax.GradientTransformation, learning_rate: Rate | None = None):
        found = rates_in(optax_optimizer)
        if learning_rate is None and len(found) == 1:
            learning_rate = found[0]
        self.learning_rate_fn = rates.unknown if learning_rate is None else rates.as_schedule(learning_rate)
        self._make: Make = lambda rate, axes: optax_optimizer

    @classmethod
    def made_by(cls, make: Make, learning_rate_fn: Schedule | None) -> "OptaxWrapper":
        """An optimizer whose transformation is made for every step it is traced in.

        Args:
          make: (the trainer's learning rate of the step, logical axes of the parameters) -> transformation. The
            structure of its state must not depend on the rate.
          learning_rate_fn: None if it uses that rate.
        """
        wrapper = cls(optax.identity())
        wrapper._make, wrapper.learning_rate_fn = make, learning_rate_fn
        return wrapper

    def transformation(self, learning_rate: float | jax.Array, axes: Tree) -> optax.GradientTransformation:
        """The transformation at this learning rate of the trainer."""
        return self._make(learning_rate, axes)

    def count(self, state: Tree) -> int | None:
        """The steps that the state has seen; None where it does not count them."""
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        counts = [int(leaf) for keys, leaf in flat if keys[-1].key == "count" and leaf.ndim == 0]
        return max(counts, default=None)

    def init(self, params: Tree, axes: Tree) -> Tree:
        return stored.to_tree(self.transformation(1.0, axes).init(params))

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        state = jax.eval_shape(lambda p: self.init(p, axes), params)
        return stored.state_axes(state, params, axes)

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """One step; see `t5x.optimizers.Optimizer`."""
        template = jax.eval_shape(self.transformation(1.0, axes).init, params)
        transformation = self.transformation(learning_rate, axes)
        updates, new = transformation.update(grads, stored.from_tree(state, template), params)
        return optax.apply_updates(params, updates), stored.to_tree(new)


def wrap_optax_optimizer(
    optax_optimizer: Callable[..., optax.GradientTransformation],
    from_axes: Callable[[Tree], Mapping[str, Any]] = lambda axes: {},
) -> Callable[..., OptaxWrapper]:
    """From a function of Optax that makes a transformation to one that makes an optimizer, with the same parameters.

    `learning_rate` may be left out: the trainer's schedule drives the optimizer then.

    Args:
      from_axes: arguments that follow from the parameters' logical axes; they hold where none is given (or None).

    >>> adam = wrap_optax_optimizer(optax.adam)
    >>> adam(b1=0.8).learning_rate_fn is None
    True
    """
    signature = _with_optional_rate(inspect.signature(optax_optimizer))

    def make_optimizer(*args: Any, **kwargs: Any) -> OptaxWrapper:
        own_rate: Schedule | None = rates.unknown
        if "learning_rate" in signature.parameters:
            given = signature.bind(*args, **kwargs).arguments.get("learning_rate")
            own_rate = None if given is None else rates.as_schedule(given)

        def make(learning_rate: Any, axes: Tree) -> optax.GradientTransformation:
            call = signature.bind(*args, **kwargs)
            if own_rate is None:
                call.arguments["learning_rate"] = learning_rate
            for name, value in from_axes(axes).items():
                if call.arguments.get(name) is None:
                    call.arguments[name] = value
            return optax_optimizer(*call.args, **call.kwargs)

        make(1.0, {})  # what is wrong with the arguments is told now
        return OptaxWrapper.made_by(make, own_rate)

    name = optax_optimizer.__name__
    make_optimizer.__name__ = make_optimizer.__qualname__ = name
    make_optimizer.__doc__ = f"Optax's `{name}`; without `learning_rate` it is driven by the trainer's schedule."
    make_optimizer.__signature__ = signature
    return make_optimizer


def _with_optional_rate(signature: inspect.Signature) -> inspect.Signature:
    """The signature with `learning_rate=None`; parameters behind it that have no default become keyword-only."""
    parameters, seen = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "learning_rate":
            parameter, seen = parameter.replace(default=None, annotation=Rate | None), True
        elif seen and parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parameter = parameter.replace(kind=parameter.KEYWORD_ONLY)
        parameters.append(parameter)
    parameters.sort(key=lambda parameter: parameter.kind)
    return inspect.Signature(parameters, return_annotation=OptaxWrapper)


def chain(
    transformations: Sequence[optax.GradientTransformation | OptaxWrapper], learning_rate: Rate | None = None
) -> OptaxWrapper:
    """One optimizer of several transformations, applied in their order.

    Args:
      transformations: of Optax, or optimizers of this package that wrap one. The trainer's schedule drives those that
        have no rate of their own, whatever the others have, and is logged then.
      learning_rate: the rate that they apply, for the log, where none of them tells it.
    """
    parts = list(transformations)
    for part in parts:
        if not isinstance(part, optax.GradientTransformation | OptaxWrapper):
            raise UserError(
                f"optimizers.chain.transformations: {part!r} is no transformation of Optax. In gin, write "
                "@optax.adamw() with its parentheses; Adafactor goes alone, with its own global_norm_clip_threshold."
            )
    found: list[Schedule | None] = []
    for part in parts:
        found += [part.learning_rate_fn] if isinstance(part, OptaxWrapper) else map(rates.as_schedule, rates_in(part))
    one = None if None in found else found[0] if len(found) == 1 else rates.unknown
    if learning_rate is not None and one is not rates.unknown:
        raise UserError(
            "optimizers.chain.learning_rate only says what the transformations apply where they do not tell it, but "
            "one of them has a learning rate, or takes the trainer's. Set it there, and leave out that of the chain."
        )

    def make(rate: Any, axes: Tree) -> optax.GradientTransformation:
        return optax.chain(*(p.transformation(rate, axes) if isinstance(p, OptaxWrapper) else p for p in parts))

    return OptaxWrapper.made_by(make, one if learning_rate is None else rates.as_schedule(learning_rate))
