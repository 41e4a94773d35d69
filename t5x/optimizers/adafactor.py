"""Adafactor as T5 uses it (Shazeer & Stern 2018), factored by logical axes.

The second moment of a matrix is kept as its row and column means. Logical axes decide which dimensions are rows and
columns if a parameter is stacked or has more than two dimensions; otherwise its size does. Dimensions that only stack
parameters (`layers`) are treated as separate parameters.
"""

import dataclasses
import difflib
import enum
import functools
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from t5x._runtime.errors import ArgumentError
from t5x.kernels.choice import ops
from t5x.optimizers.protocol import Optimizer, TreeOptimizer, path_of, paths_in


class FactorDim(enum.Enum):
    """The role of a dimension in the factored second moment."""

    BATCH = "batch"  # stacks independent parameters
    ROW = "row"
    COLUMN = "column"
    NONE = "none"  # a parameter with such a dimension is not factored


class HeuristicRule(enum.Enum):
    """The value of `HParamMap` for parameters that are factored by their size."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token


class HParamMap:
    """A setting by parameter path, for `factor_map` and `multiply_by_parameter_scale`.

    Args:
      rules: pairs of a regular expression, searched in the path `encoder/layers_0/…`, and a value. The first match
        wins.

    Example:
      >>> HParamMap([("scale$", None), (".*", HEURISTIC_RULE)])["encoder/encoder_norm/scale"] is None
      True
    """

    def __init__(self, rules: Sequence[tuple[str, Any]]):
        self._rules = [(re.compile(pattern), value) for pattern, value in rules]

    def __getitem__(self, path: str) -> Any:
        for pattern, value in self._rules:
            if pattern.search(path):
                return value
        raise KeyError(f"no pattern of this HParamMap matches the parameter {path}")

    def __call__(self, params: Any) -> Any:
        """Return the values in the structure of `params`."""
        return jax.tree.unflatten(jax.tree.structure(params), [self[path] for path in paths_in(params)])


def factor_name_to_factordim(name: str | FactorDim | None) -> FactorDim | None:
    """Return the FactorDim of a name: row, col, column, batch, none or unfactorized, in any case."""
    if not isinstance(name, str):
        return name
    name = {"col": "column", "unfactorized": "none"}.get(name.lower(), name.lower())
    return FactorDim(name)


def standard_logical_factor_rules(rules: Mapping[str, FactorDim] | None = None) -> dict[str, FactorDim]:
    """Return T5's rules by logical axis; `rules` adds to them or overrides them."""
    row, column, none, batch = FactorDim.ROW, FactorDim.COLUMN, FactorDim.NONE, FactorDim.BATCH
    standard = {
        "vocab": column, "embed": row, "mlp": column, "heads": column, "kv": column, "joined_kv": column,
        "relpos_buckets": none, "layers": batch, "stack": batch, "q_wi_fused": column, "o_wo_fused": column,
        "multiquery_heads": column, "kv_fused": column, "mlp_activations": column, "layer_norm_scale": none,
    }  # fmt: skip
    return standard | dict(rules or {})


@dataclasses.dataclass(frozen=True)
class FactorPlan:
    """How the second moment of a parameter is factored.

    Attributes:
      v_row_drops, v_col_drops: dimensions averaged in `v_row` and `v_col`; both empty if it is not factored.
      batch: dimensions that stack independent parameters.
    """

    v_row_drops: tuple[int, ...] = ()
    v_col_drops: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()

    def own(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions that belong to one parameter."""
        return tuple(d for d in range(ndim) if d not in self.batch)

    def unused(self, beta1: float | None) -> set[str]:
        """Return the slots that are not used."""
        return ({"v"} if self.v_row_drops else {"v_row", "v_col"}) | ({"m"} if beta1 is None else set())

    def slots(self, dims: tuple, unused: tuple, beta1: float | None) -> dict[str, tuple]:
        """Return, for every slot, what `dims` (sizes or axes of the parameter) becomes; `unused` if it is not used."""
        without = lambda drops: tuple(dim for d, dim in enumerate(dims) if d not in drops)
        slots = {"m": dims, "v": dims, "v_row": without(self.v_row_drops), "v_col": without(self.v_col_drops)}
        return slots | dict.fromkeys(self.unused(beta1), unused)


@flax.struct.dataclass
class _AdafactorParamState:
    """The state of one parameter in T5X's `param_states`."""

    v_row: Any
    v_col: Any
    v: Any
    m: Any


@dataclasses.dataclass(eq=False, repr=False)
class Adafactor(TreeOptimizer):
    """Adafactor with T5X's parameters. The trainer's schedule gives the learning rate of every step.

    It computes in float32, or in float64 if the parameters are float64. On one NVIDIA GPU and with T5's settings, most
    parameters are updated by kernels, through which JAX cannot differentiate.

    Args:
      learning_rate: default of `apply_gradient`; ignored by the trainer, which passes the rate of its schedule.
      factored: keep the second moments of matrices as row and column means.
      multiply_by_parameter_scale: scale the step by the RMS of the parameter; may be an HParamMap.
      beta1: momentum; None disables it and saves its memory.
      decay_rate: the decay of the second moment at step t is 1 - t^-decay_rate.
      step_offset: subtracted from the step in that formula, for fine-tuning with fresh statistics.
      clipping_threshold: maximum RMS of an update before scaling; None does not clip.
      weight_decay_rate: fraction of the parameter subtracted per step; None disables weight decay.
      min_dim_size_to_factor: a matrix with a smaller side is not factored, unless logical rules say so.
      epsilon1: added to the squared gradient.
      epsilon2: minimum parameter scale.
      dtype_momentum: dtype of the momentum.
      factor_map: {parameter path: role of each dimension}; overrides `logical_factor_rules` and sizes. As in T5X, an
        HParamMap is used only without `logical_factor_rules`, and for more than two dimensions or stacked parameters.
      logical_factor_rules: see `standard_logical_factor_rules`.
      weight_decay_rate_lr_exponent: multiplies the decay by learning_rate ** this.
      global_norm_clip_threshold: maximum global norm of the gradients.
      max_parameter_scale: maximum parameter scale.
      skip_nan_updates: leave a parameter and its state unchanged if its gradient, the squared gradient or the update
        is not finite. In stacked parameters, this applies to each layer.
      weight_decay_mask: which parameters are decayed, see `optimizers.weight_decay_mask`; None decays all.

    Example:
      >>> optimizer, params, axes = Adafactor(), {"w": jnp.ones((2, 3))}, {"w": ("embed", "mlp")}
      >>> state = optimizer.init(params, axes)
      >>> rate = jnp.float32(0.1)
      >>> new, state = optimizer.update(params, state, params, axes, step=jnp.int32(0), learning_rate=rate)
      >>> new["w"].shape
      (2, 3)
    """

    learning_rate: float | None = None
    factored: bool = True
    multiply_by_parameter_scale: bool | HParamMap = True
    beta1: float | None = None
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float | None = 1.0
    weight_decay_rate: float | None = None
    min_dim_size_to_factor: int = 128
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    dtype_momentum: DTypeLike = jnp.float32
    factor_map: Mapping[str, tuple[FactorDim, ...]] | HParamMap | None = None
    logical_factor_rules: Mapping[str, FactorDim] | None = None
    weight_decay_rate_lr_exponent: float | None = None
    global_norm_clip_threshold: float | None = None
    max_parameter_scale: float | None = None
    skip_nan_updates: bool | None = False
    weight_decay_mask: Callable[[Any], Any] | None = None

    def __post_init__(self):
        rules, by_pattern = self.logical_factor_rules, None
        self._factor_map: dict[str, tuple[FactorDim, ...]] = {}
        if not isinstance(self.factor_map, HParamMap):
            self._factor_map |= self.factor_map or {}
        elif not self.factored:
            raise ArgumentError("adafactor.Adafactor has factored=False and a factor_map. Remove one of them.")
        elif rules is None:
            by_pattern = self.factor_map
        self._hparam_rules = by_pattern
        self._factor_rules = standard_logical_factor_rules() if rules is None else rules

    @property
    def hyper_params(self) -> Any:
        return _AdafactorHyperParams(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def with_hyper_params(self, hyper_params: Any) -> "Adafactor":
        return type(self)(**vars(hyper_params))

    # -- factorization -------------------------------------------------------------------------------------------------

    def plan(self, path: str, shape: tuple[int, ...], axes: tuple[str, ...] | None) -> FactorPlan:
        """Return how the parameter with this path, shape and logical axes is factored.

        Raises:
          ArgumentError: if the rules do not say how to factor it.
        """
        mapped = self._factor_map.get(path)
        kinds: Sequence[FactorDim | None] | None = mapped
        if self._hparam_rules is not None:
            kinds = self._hparam_rules[path]
            if kinds is None:
                return FactorPlan()
            kinds, axes = None if kinds is HEURISTIC_RULE else tuple(map(factor_name_to_factordim, kinds)), None
        elif kinds is None and axes is not None:
            if unruled := [axis for axis in axes if axis not in self._factor_rules]:
                if len(shape) > 2:
                    raise ArgumentError(
                        f"Adafactor: no factor rule for the logical axis {unruled[0]!r} of {path} {axes}. Add it to "
                        "adafactor.Adafactor.logical_factor_rules (ROW, COLUMN, BATCH or NONE)."
                    )
                axes = None
            else:
                kinds = tuple(self._factor_rules[axis] for axis in axes)
        if kinds is not None and len(kinds) != len(shape):
            raise ArgumentError(
                f"adafactor.Adafactor.factor_map: {path} has {len(shape)} dimensions, not {len(kinds)}."
            )
        if kinds is None and len(shape) > 2:
            problem = f"Adafactor: {path} {shape} has no logical axes"
            raise ArgumentError(f"{problem}. Add it to adafactor.Adafactor.factor_map.")
        dims = {kind: tuple(d for d, k in enumerate(kinds or ()) if k is kind) for kind in FactorDim}
        batch, row, column = dims[FactorDim.BATCH], dims[FactorDim.ROW], dims[FactorDim.COLUMN]
        if mapped is None and len(shape) <= 2 and not batch:
            if not self.factored or len(shape) < 2 or min(shape) < self.min_dim_size_to_factor:
                return FactorPlan()
            smaller, larger = (int(d) for d in np.argsort(shape))
            return FactorPlan(v_row_drops=(larger,), v_col_drops=(smaller,))
        if row and column and dims[FactorDim.NONE]:
            problem = f"{path} {axes} mixes ROW, COLUMN and NONE dimensions"
            raise ArgumentError(f"Adafactor: {problem}; NONE cannot be factored.")
        if not self.factored or not (row and column):
            return FactorPlan(batch=batch)
        return FactorPlan(v_row_drops=column, v_col_drops=row, batch=batch)

    # -- state ---------------------------------------------------------------------------------------------------------

    def init(self, params: Any, axes: Any) -> Any:
        """Return {m, v, v_row, v_col} per parameter; unused slots are zeros of shape (1,).

        Raises:
          ArgumentError: if `factor_map` names a parameter that does not exist.
        """
        paths = paths_in(params)
        if unknown := self._factor_map.keys() - set(paths):
            closest = ", ".join(difflib.get_close_matches(min(unknown), paths, cutoff=0))
            problem = f"no parameter is {min(unknown)!r}. Closest: {closest}."
            raise ArgumentError(f"adafactor.Adafactor.factor_map: {problem}")

        def slots_of(path, param, axes):
            shapes = self.plan(path, param.shape, axes).slots(param.shape, (1,), self.beta1)
            slots = {name: jnp.zeros(shape, _precision(param)) for name, shape in shapes.items()}
            return slots if self.beta1 is None else slots | {"m": slots["m"].astype(self.dtype_momentum)}

        return _map(slots_of, params, axes)

    def init_param_states(self, params: Any, axes: Any) -> Any:
        typed = lambda path, param, axes, slots: _AdafactorParamState(**slots)
        return _map(typed, params, axes, self.init(params, axes))

    def state_axes(self, params: Any, axes: Any) -> Any:
        """Return the logical axes of the state: those of the parameter without the averaged dimensions."""

        def slot_axes(path, param, axes):
            plan = self.plan(path, param.shape, axes)
            return plan.slots(axes or (None,) * len(param.shape), (None,), self.beta1)

        return _map(slot_axes, params, axes)

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        """Return the optimizer with logical axes instead of arrays. As in T5X, averages have none."""

        def slot_axes(path, param, axes, slots):
            of_shape = lambda slot: axes if slot.shape == param.shape else None
            return _AdafactorParamState(v_row=None, v_col=None, v=of_shape(slots.v), m=of_shape(slots.m))

        states = _map(slot_axes, optimizer.target, param_logical_axes, optimizer.state.param_states)
        state = optimizer.state.replace(step=None, param_states=states)
        return optimizer.replace(state=state, target=param_logical_axes)

    def init_param_state(self, param: jax.Array, path: str) -> _AdafactorParamState:
        """Return the state of one parameter."""
        return self.init_param_states({path: param}, {path: self._find_axes(path)})[path]

    def apply_param_gradient(
        self, step: jax.Array, hyper_params: Any, param: jax.Array, state: Any, grad: jax.Array, path: str
    ) -> tuple[jax.Array, _AdafactorParamState]:
        """Take one step with one parameter; return it with its new state. A subclass may override it."""
        step_args = {"step": step, "learning_rate": hyper_params.learning_rate}
        definition, axes = self.with_hyper_params(hyper_params), {path: self._find_axes(path)}
        trees = {path: grad}, {path: state}, {path: param}
        new, states = definition.take_step(*trees, axes, update=definition._update, **step_args)
        return new[path], states[path]

    def _find_axes(self, path: str) -> tuple[str, ...] | None:
        axes = self._param_axes
        for name in path.split("/"):
            axes = axes.get(name) if isinstance(axes, Mapping) else None
        return axes

    # -- update --------------------------------------------------------------------------------------------------------

    def update(
        self, grads: Any, state: Any, params: Any, axes: Any, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Any, Any]:
        """Take one step; see `t5x.optimizers.OptimizerDef`."""
        step_args = {"step": step, "learning_rate": learning_rate}
        if type(self).apply_param_gradient is Adafactor.apply_param_gradient:
            return self._update(grads, state, params, axes, **step_args)
        self.set_param_axes(axes)
        hyper_params = self.update_hyper_params(learning_rate=learning_rate)

        def update_param(path, param, axes, grad, slots):
            before = _AdafactorParamState(**slots)
            new, after = self.apply_param_gradient(step, hyper_params, param, before, grad, path)
            return new, flax.serialization.to_state_dict(after)

        return _unzipped(_map(update_param, params, axes, self._clipped(grads), state))

    def _clipped(self, grads: Any) -> Any:
        """Return the gradients with a global norm of at most `global_norm_clip_threshold`."""
        if self.global_norm_clip_threshold is None:
            return grads
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(_precision(g)))) for g in jax.tree.leaves(grads)))
        factor = jnp.minimum(1.0, self.global_norm_clip_threshold / norm)
        return jax.tree.map(lambda g: g * factor, grads)

    def _update(
        self, grads: Any, state: Any, params: Any, axes: Any, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Any, Any]:
        grads = self._clipped(grads)
        decay = 1.0 - (step - self.step_offset + 1.0) ** -self.decay_rate
        mask = self.weight_decay_mask or (lambda params: jax.tree.map(lambda _: True, params))
        settings = self._kernel_settings(learning_rate)
        kernels = ops().adafactor_kernels() if settings else None
        rates = jnp.stack([decay, jnp.reshape(learning_rate, ())]).astype(jnp.float32) if kernels else None

        def update_checked(path, param, axes, grad, slots, decayed):
            plan = self.plan(path, param.shape, axes)
            grad = grad.astype(_precision(param))
            scaled = self.multiply_by_parameter_scale
            scaled = scaled[path] if isinstance(scaled, HParamMap) else scaled
            if kernels and settings and scaled:
                updated = _update_with_kernels(kernels, plan, param, grad, slots, rates, settings)
                if updated is not None:
                    return updated
            new_param, new_slots = self._update_one(plan, param, grad, slots, decay, learning_rate, decayed, scaled)
            if self.skip_nan_updates:
                finite = jnp.isfinite(new_param) & jnp.isfinite(jnp.square(grad))
                keep = jnp.all(finite, axis=plan.own(param.ndim), keepdims=True)
                new_param = jnp.where(keep, new_param, param)
                dropped = {"v_row": plan.v_row_drops, "v_col": plan.v_col_drops}
                for name in sorted(new_slots.keys() - plan.unused(self.beta1)):
                    keep_slot = jnp.squeeze(keep, dropped.get(name, ()))
                    new_slots[name] = jnp.where(keep_slot, new_slots[name], slots[name])
            return new_param, new_slots

        return _unzipped(_map(update_checked, params, axes, grads, state, mask(params)))

    def _kernel_settings(self, learning_rate: Any) -> tuple[float, float, float] | None:
        """Return the settings that our GPU kernels take; None if they do not support all settings."""
        if jnp.size(learning_rate) != 1 or self.skip_nan_updates:
            return None
        if any(value is not None for value in (self.beta1, self.weight_decay_rate, self.max_parameter_scale)):
            return None
        settings = self.epsilon1, self.epsilon2, self.clipping_threshold or 0.0
        known = all(isinstance(value, numbers.Real) for value in settings)  # not arrays, which may be traced
        return settings if known and settings[-1] > 0 else None

    def _update_one(self, plan: FactorPlan, param, grad, slots, decay, learning_rate, decayed, scaled):
        own = plan.own(param.ndim)
        mean = functools.partial(jnp.mean, keepdims=True)

        def rms(x):
            return jnp.sqrt(mean(jnp.square(x), own))

        squared = jnp.square(grad) + self.epsilon1
        new = dict(slots)
        if plan.v_row_drops:

            def moment(slot, drops):
                return decay * jnp.expand_dims(slots[slot], drops) + (1.0 - decay) * mean(squared, drops)

            row, col = moment("v_row", plan.v_row_drops), moment("v_col", plan.v_col_drops)
            new |= {"v_row": jnp.squeeze(row, plan.v_row_drops), "v_col": jnp.squeeze(col, plan.v_col_drops)}
            step = grad * (row / mean(row, own)) ** -0.5 * col**-0.5
        else:
            new["v"] = decay * slots["v"] + (1.0 - decay) * squared
            step = grad * new["v"] ** -0.5
        if self.clipping_threshold is not None:
            step = step / jnp.maximum(1.0, rms(step) / self.clipping_threshold)
        scale = learning_rate
        if scaled:
            size = jnp.maximum(rms(param), self.epsilon2)
            scale = scale * (size if self.max_parameter_scale is None else jnp.minimum(size, self.max_parameter_scale))
        step = step * scale
        if self.beta1 is not None:
            step = self.beta1 * slots["m"].astype(step.dtype) + (1.0 - self.beta1) * step
            new["m"] = step.astype(self.dtype_momentum)
        if self.weight_decay_rate is not None and decayed:
            rate = self.weight_decay_rate
            if self.weight_decay_rate_lr_exponent is not None:
                rate = rate * learning_rate**self.weight_decay_rate_lr_exponent
            param = (1.0 - rate) * param
        return param - step, new


def _update_with_kernels(
    kernels: Any, plan: FactorPlan, param, grad, slots, rates, options: tuple[float, float, float]
):
    """Return what `Adafactor._update_one` does; None if the kernels do not support this parameter."""
    if not kernels.fits(param) or plan.batch or (param.ndim == 2) != bool(plan.v_row_drops):
        return None
    if any(slot.dtype != param.dtype for slot in slots.values()):
        return None
    settings = kernels.KernelSettings(*map(float, options))
    if param.ndim == 1:
        param, v = kernels.update_vector(param, grad, slots["v"], rates, settings=settings)
        return param, {**slots, "v": v}
    moments, row_axis = (slots["v_row"], slots["v_col"]), plan.v_col_drops[0]
    param, v_row, v_col = kernels.update_matrix(param, grad, *moments, rates, row_axis=row_axis, settings=settings)
    return param, {**slots, "v_row": v_row, "v_col": v_col}


_defaults = {field.name: field.default for field in dataclasses.fields(Adafactor)}
_AdafactorHyperParams = flax.struct.dataclass(
    type("_AdafactorHyperParams", (), {**_defaults, "__annotations__": dict.fromkeys(_defaults, Any)})
)


def _unzipped(pairs: Any) -> tuple[Any, Any]:
    is_pair = lambda x: isinstance(x, tuple)
    return tuple(jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=is_pair) for i in (0, 1))


def _map(function, params: Any, axes: Any, *trees: Any) -> Any:
    """Map function(path, param, axes, *trees) over the leaves of `params`; the other trees may have subtrees there."""
    return jax.tree_util.tree_map_with_path(lambda keys, *row: function(path_of(keys), *row), params, axes, *trees)


def _precision(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
