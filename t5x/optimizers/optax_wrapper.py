"""Optax transformations as optimizers of the trainer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from optax import contrib

from t5x._runtime.errors import UserError
from t5x.optimizers import protocol
from t5x.optimizers.protocol import TreeOptimizer, path_of
from t5x.optimizers.schedules import Rate, Schedule, as_schedule, rates_in, unknown_rate

Tree = Any
Make = Callable[[float | jax.Array, Tree], optax.GradientTransformation]


class OptaxWrapper(TreeOptimizer):
    """An Optax transformation as an optimizer. Its state is stored as in T5X and sharded like the parameters.

    Args:
      optax_optimizer: the transformation, including its learning rate.
      learning_rate: that rate, a number or a schedule, for the log. Needed if the transformation does not reveal it:
        those of gin files do, those created in Python do not.

    Attributes:
      learning_rate_fn: the rate by the optimizer's own steps; None if the trainer's schedule drives it.
      transformation: (trainer's learning rate of a step, logical axes of the parameters) -> transformation.
    """

    learning_rate_fn: Schedule | None

    def __init__(self, optax_optimizer: optax.GradientTransformation, learning_rate: Rate | None = None):
        rates = rates_in(optax_optimizer)
        if learning_rate is None and len(rates) == 1:
            learning_rate = rates[0]
        self.learning_rate_fn = unknown_rate if learning_rate is None else as_schedule(learning_rate)
        self.transformation: Make = lambda rate, axes: optax_optimizer

    @classmethod
    def from_factory(cls, make: Make, learning_rate_fn: Schedule | None) -> "OptaxWrapper":
        """Return an optimizer that creates its transformation whenever it is traced.

        Args:
          make: see `transformation`. The structure of its state must not depend on the rate.
          learning_rate_fn: None if it uses the trainer's rate.
        """
        wrapper = cls(optax.identity())
        wrapper.transformation, wrapper.learning_rate_fn = make, learning_rate_fn
        return wrapper

    def count(self, state: Tree) -> int | None:
        """Return the number of steps that the state has seen; None if it does not count them."""
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        counts = [int(leaf) for keys, leaf in flat if path_of(keys[-1:]) == "count" and leaf.ndim == 0]
        return max(counts, default=None)

    def init_param_states(self, params: Tree, axes: Tree) -> Tree:
        return protocol.without_keys(self.transformation(1.0, axes).init(params))

    def init(self, params: Tree, axes: Tree) -> Tree:
        return self.to_stored(self.init_param_states(params, axes))

    def to_stored(self, param_states: Tree) -> Tree:
        return protocol.to_tree(param_states)

    def from_stored(self, stored: Tree, param_states: Tree) -> Tree:
        return protocol.from_tree(stored, param_states)

    def state_axes(self, params: Tree, axes: Tree) -> Tree:
        state = jax.eval_shape(lambda p: self.init(p, axes), params)
        return protocol.state_axes(state, params, axes)

    def update(
        self, grads: Tree, state: Tree, params: Tree, axes: Tree, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Tree, Tree]:
        """Take one step; see `t5x.optimizers.OptimizerDef`."""
        template = jax.eval_shape(self.transformation(1.0, axes).init, params)
        transformation = self.transformation(learning_rate, axes)
        before = protocol.with_keys(protocol.from_tree(state, template), template)
        updates, new = transformation.update(grads, before, params)
        return optax.apply_updates(params, updates), self.to_stored(protocol.without_keys(new))


def wrap_optax_optimizer(
    optax_optimizer: Callable[..., optax.GradientTransformation],
    from_axes: Callable[[Tree], Mapping[str, Any]] = lambda axes: {},
) -> Callable[..., OptaxWrapper]:
    """Turn a function that returns an Optax transformation into one that returns an optimizer.

    The new function has the same parameters; without `learning_rate`, the trainer's schedule drives the optimizer.

    Args:
      optax_optimizer: the function of Optax.
      from_axes: logical axes of the parameters -> default values of arguments.

    Example:
      >>> adam = wrap_optax_optimizer(optax.adam)
      >>> adam(b1=0.8).learning_rate_fn is None
      True
    """
    signature = _with_optional_rate(inspect.signature(optax_optimizer))

    def make_optimizer(*args: Any, **kwargs: Any) -> OptaxWrapper:
        own_rate: Schedule | None = unknown_rate
        if "learning_rate" in signature.parameters:
            rate = signature.bind(*args, **kwargs).arguments.get("learning_rate")
            own_rate = None if rate is None else as_schedule(rate)

        def make(learning_rate: Any, axes: Tree) -> optax.GradientTransformation:
            call = signature.bind(*args, **kwargs)
            if own_rate is None:
                call.arguments["learning_rate"] = learning_rate
            for name, value in from_axes(axes).items():
                if call.arguments.get(name) is None:
                    call.arguments[name] = value
            return optax_optimizer(*call.args, **call.kwargs)

        make(1.0, {})  # report invalid arguments now
        return OptaxWrapper.from_factory(make, own_rate)

    name = optax_optimizer.__name__
    make_optimizer.__name__ = make_optimizer.__qualname__ = name
    make_optimizer.__doc__ = f"Return Optax's `{name}`; without `learning_rate`, the trainer's schedule drives it."
    make_optimizer.__signature__ = signature  # type: ignore[attr-defined]
    return make_optimizer


def _with_optional_rate(signature: inspect.Signature) -> inspect.Signature:
    """Give `learning_rate` the default None; parameters after it that have no default become keyword-only."""
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
    """Return one optimizer that applies several transformations in order.

    Args:
      transformations: Optax transformations, or optimizers of this package that wrap one. The trainer's schedule drives
        those without a rate of their own, and is then the rate that is logged.
      learning_rate: the rate that they apply, for the log, if none of them reveals it.

    Raises:
      UserError: if an entry is not a transformation, or `learning_rate` contradicts them.

    Example:
      >>> optimizer = chain([optax.clip_by_global_norm(1.0), optax.adam(1e-3)], learning_rate=1e-3)
      >>> round(float(optimizer.learning_rate_fn(0)), 6)
      0.001
    """
    parts = list(transformations)
    rates: list[Schedule | None] = []
    for part in parts:
        if not isinstance(part, optax.GradientTransformation | OptaxWrapper):
            raise UserError(
                f"optimizers.chain.transformations: {part!r} is not an Optax transformation. In gin, write "
                "@optax.adamw() with parentheses. Adafactor cannot be chained; set its global_norm_clip_threshold."
            )
        rates += [part.learning_rate_fn] if isinstance(part, OptaxWrapper) else map(as_schedule, rates_in(part))
    logged = None if None in rates else rates[0] if len(rates) == 1 else unknown_rate
    if learning_rate is not None:
        if logged is not unknown_rate:
            raise UserError(
                f"optimizers.chain.learning_rate is {learning_rate}, but a transformation already has a learning rate, "
                "or takes the trainer's. Set the rate there and remove it from the chain."
            )
        logged = as_schedule(learning_rate)

    def make(rate: Any, axes: Tree) -> optax.GradientTransformation:
        return optax.chain(*(p.transformation(rate, axes) if isinstance(p, OptaxWrapper) else p for p in parts))

    return OptaxWrapper.from_factory(make, logged)


def _muon_dimensions(axes: Any) -> dict[str, Any]:
    """Return which dimensions of each parameter are the rows and columns of a matrix; None if Adam handles it."""

    def matrix(names: tuple[str | None, ...] | None) -> contrib.MuonDimensionNumbers | None:
        names = names or ()
        own = [d for d, name in enumerate(names) if name not in ("layers", "stack")]
        if len(own) < 2 or {"vocab", "relpos_buckets"}.intersection(names):
            return None
        inputs = 1 if names[own[0]] == "embed" else len(own) - 1
        return contrib.MuonDimensionNumbers(tuple(own[:inputs]), tuple(own[inputs:]))

    is_leaf = lambda node: node is None or isinstance(node, tuple)
    return {"muon_weight_dimension_numbers": jax.tree.map(matrix, axes, is_leaf=is_leaf)}


muon = wrap_optax_optimizer(contrib.muon, _muon_dimensions)
muon.__doc__ = f"""{muon.__doc__}

Muon updates the matrices of hidden layers, each layer of a stack separately. Adam updates embeddings, logits, position
biases, norms and parameters without logical axes. Set `muon_weight_dimension_numbers` to change this; see Optax.
"""


def dpsgd(*args: Any, **kwargs: Any) -> Any:
    """Raise a UserError: DP-SGD needs per-example gradients, which the trainer does not compute."""
    raise UserError("optimizers.dpsgd needs per-example gradients, which the trainer lacks. Choose another optimizer.")


adabelief = wrap_optax_optimizer(optax.adabelief)
adagrad = wrap_optax_optimizer(optax.adagrad)
adam = wrap_optax_optimizer(optax.adam)
adamw = wrap_optax_optimizer(optax.adamw)
fromage = wrap_optax_optimizer(optax.fromage)
lamb = wrap_optax_optimizer(optax.lamb)
lars = wrap_optax_optimizer(optax.lars)
lion = wrap_optax_optimizer(optax.lion)
noisy_sgd = wrap_optax_optimizer(optax.noisy_sgd)
radam = wrap_optax_optimizer(optax.radam)
rmsprop = wrap_optax_optimizer(optax.rmsprop)
sgd = wrap_optax_optimizer(optax.sgd)
yogi = wrap_optax_optimizer(optax.yogi)
