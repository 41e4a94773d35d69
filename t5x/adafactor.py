"""Adafactor as T5 uses it (Shazeer & Stern 2018), factored by logical axes.

A second moment of a matrix is kept as its row and column means. Which dimensions are rows and columns follows from
the parameter's logical axes where it is stacked or has more than two dimensions, else from its size. Dimensions that
only stack parameters (`layers`) are treated as so many parameters.
"""

import dataclasses
import difflib
import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x.errors import UserError


class FactorDim(enum.Enum):
    """What a dimension is to the factored second moment."""

    BATCH = "batch"  # stacks independent parameters
    ROW = "row"
    COLUMN = "column"
    NONE = "none"  # a parameter with such a dimension is not factored


def standard_logical_factor_rules(rules: Mapping[str, FactorDim] | None = None) -> dict[str, FactorDim]:
    """T5's rules by logical axis; `rules` adds to them or replaces some."""
    row, column, none, batch = FactorDim.ROW, FactorDim.COLUMN, FactorDim.NONE, FactorDim.BATCH
    standard = {
        "vocab": column, "embed": row, "mlp": column, "heads": column, "kv": column, "joined_kv": column,
        "relpos_buckets": none, "layers": batch, "stack": batch, "q_wi_fused": column, "o_wo_fused": column,
        "multiquery_heads": column, "kv_fused": column, "mlp_activations": column, "layer_norm_scale": none,
    }  # fmt: skip
    return standard | dict(rules or {})


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one parameter is treated: the dims averaged away in `v_row` and in `v_col` (both empty: not factored)."""

    v_row_drops: tuple[int, ...] = ()
    v_col_drops: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()

    @property
    def factored(self) -> bool:
        return bool(self.v_row_drops)

    def own(self, ndim: int) -> tuple[int, ...]:
        """The dimensions that belong to one parameter."""
        return tuple(d for d in range(ndim) if d not in self.batch)

    def unused(self, beta1: float | None) -> set[str]:
        """The slots that hold nothing."""
        return ({"v"} if self.factored else {"v_row", "v_col"}) | ({"m"} if beta1 is None else set())


class Adafactor:
    """Adafactor with T5X's parameters; the learning rate is given at every step by the trainer's schedule.

    Args:
      learning_rate: must be None: the rate is the trainer's schedule.
      factored: keep the second moments of matrices as row and column means.
      multiply_by_parameter_scale: step relative to the size (RMS) of the parameter.
      beta1: momentum; None has none and no memory for it.
      decay_rate: the second moment's decay at step t is 1 - t^-decay_rate.
      step_offset: subtracted from the step in that rule, for a fine-tuning that starts its statistics anew.
      clipping_threshold: largest RMS of an update before scaling; None does not clip.
      weight_decay_rate: share of the parameter subtracted a step; None is none.
      min_dim_size_to_factor: a matrix with a smaller side is not factored (unless logical rules say so).
      epsilon1: added to the squared gradient. epsilon2: smallest parameter scale.
      dtype_momentum: of the momentum.
      factor_map: what each dimension is, by the path of a parameter. It holds for those named, whatever their size and
        whatever `logical_factor_rules` say.
      logical_factor_rules: see `standard_logical_factor_rules`.
      weight_decay_rate_lr_exponent: scales the decay by learning_rate ** this.
      global_norm_clip_threshold: clips the norm of all gradients together.
      max_parameter_scale: largest parameter scale.
      skip_nan_updates: a parameter whose gradient, its square or its update is not finite stays as it is for that step,
        state included; of stacked ones, that layer.
      weight_decay_mask: which parameters are decayed, see `optimizers.weight_decay_mask`; None decays all.

    It computes in float32, or in float64 where the parameters are of that type.
    """

    def __init__(
        self,
        learning_rate: float | None = None,
        factored: bool = True,
        multiply_by_parameter_scale: bool = True,
        beta1: float | None = None,
        decay_rate: float = 0.8,
        step_offset: int = 0,
        clipping_threshold: float | None = 1.0,
        weight_decay_rate: float | None = None,
        min_dim_size_to_factor: int = 128,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        dtype_momentum: Any = jnp.float32,
        factor_map: Mapping[str, tuple[FactorDim, ...]] | None = None,
        logical_factor_rules: Mapping[str, FactorDim] | None = None,
        weight_decay_rate_lr_exponent: float | None = None,
        global_norm_clip_threshold: float | None = None,
        max_parameter_scale: float | None = None,
        skip_nan_updates: bool = False,
        weight_decay_mask: Callable[[Any], Any] | None = None,
    ):
        if learning_rate is not None:
            raise UserError(
                f"adafactor.Adafactor.learning_rate is {learning_rate}, but the rate of a step is trainer.Trainer's "
                "learning_rate_fn. Set it there, e.g. utils.create_learning_rate_scheduler with factors='constant'."
            )
        self.factored = factored
        self.multiply_by_parameter_scale = multiply_by_parameter_scale
        self.beta1 = beta1
        self.decay_rate = decay_rate
        self.step_offset = step_offset
        self.clipping_threshold = clipping_threshold
        self.weight_decay_rate = weight_decay_rate
        self.min_dim_size_to_factor = min_dim_size_to_factor
        self.epsilon1 = epsilon1
        self.epsilon2 = epsilon2
        self.dtype_momentum = dtype_momentum
        self.factor_map = dict(factor_map or {})
        self.rules = dict(standard_logical_factor_rules() if logical_factor_rules is None else logical_factor_rules)
        self.weight_decay_rate_lr_exponent = weight_decay_rate_lr_exponent
        self.global_norm_clip_threshold = global_norm_clip_threshold
        self.max_parameter_scale = max_parameter_scale
        self.skip_nan_updates = skip_nan_updates
        self.weight_decay_mask = weight_decay_mask

    # -- which dimensions are averaged ---------------------------------------------------------------------------------

    def plan(self, path: str, shape: tuple[int, ...], axes: tuple[str, ...] | None) -> Plan:
        """How the parameter of this path, shape and logical axes is treated."""
        told = self.factor_map.get(path)
        if told is not None and len(told) != len(shape):
            raise UserError(
                f"adafactor.Adafactor.factor_map names {len(told)} dimensions of {path}, which has {len(shape)}."
            )
        kinds = told
        if kinds is None and axes is not None:
            if unruled := [axis for axis in axes if axis not in self.rules]:
                if len(shape) > 2:
                    raise UserError(
                        f"Adafactor: no factor rule for the logical axis {unruled[0]!r} of {path} {axes}. Add it to "
                        "adafactor.Adafactor.logical_factor_rules (ROW, COLUMN, BATCH or NONE)."
                    )
                axes = None
            else:
                kinds = tuple(self.rules[axis] for axis in axes)
        if kinds is None and len(shape) > 2:
            raise UserError(f"Adafactor: {path} has {len(shape)} dimensions and no logical axes to factor it by.")
        of = lambda kind: tuple(d for d, k in enumerate(kinds or ()) if k is kind)
        batch, row, column = of(FactorDim.BATCH), of(FactorDim.ROW), of(FactorDim.COLUMN)
        if told is None and len(shape) <= 2 and not batch:
            return self._plan_by_size(shape)
        if row and column and of(FactorDim.NONE):
            raise UserError(f"Adafactor: {path} {axes} mixes ROW, COLUMN and NONE dimensions; NONE cannot be factored.")
        if not self.factored or not (row and column):
            return Plan(batch=batch)
        return Plan(v_row_drops=column, v_col_drops=row, batch=batch)

    def _plan_by_size(self, shape: tuple[int, ...]) -> Plan:
        if not self.factored or len(shape) < 2 or min(shape) < self.min_dim_size_to_factor:
            return Plan()
        smaller, larger = (int(d) for d in np.argsort(shape))
        return Plan(v_row_drops=(larger,), v_col_drops=(smaller,))

    # -- state ---------------------------------------------------------------------------------------------------------

    def init(self, params: Any, axes: Any) -> Any:
        """Per parameter {m, v, v_row, v_col}; those not in use are zeros of shape (1,), as T5X stores them."""
        paths = _paths(params)
        if unknown := self.factor_map.keys() - set(paths):
            near = ", ".join(difflib.get_close_matches(min(unknown), paths, cutoff=0))
            raise UserError(
                f"adafactor.Adafactor.factor_map names {min(unknown)!r}, which is no parameter; the nearest are {near}."
            )
        return _map(lambda path, p, a: self._slots(self.plan(path, p.shape, a), p.shape, _precision(p)), params, axes)

    def _slots(self, plan: Plan, shape: tuple[int, ...], dtype: Any) -> dict[str, jax.Array]:
        less = lambda drops: tuple(n for d, n in enumerate(shape) if d not in drops)
        shapes = {"m": shape, "v": shape, "v_row": less(plan.v_row_drops), "v_col": less(plan.v_col_drops)}
        shapes |= dict.fromkeys(plan.unused(self.beta1), (1,))
        slots = {name: jnp.zeros(s, dtype) for name, s in shapes.items()}
        return slots if self.beta1 is None else slots | {"m": slots["m"].astype(self.dtype_momentum)}

    def state_axes(self, params: Any, axes: Any) -> Any:
        """Logical axes of the state: those of the parameter, less what was averaged away."""

        def slot_axes(path, p, a):
            plan = self.plan(path, p.shape, a)
            a = a or (None,) * len(p.shape)
            less = lambda drops: tuple(axis for d, axis in enumerate(a) if d not in drops)
            slots = {"m": a, "v": a, "v_row": less(plan.v_row_drops), "v_col": less(plan.v_col_drops)}
            return slots | dict.fromkeys(plan.unused(self.beta1), (None,))

        return _map(slot_axes, params, axes)

    # -- the step ------------------------------------------------------------------------------------------------------

    def update(
        self, grads: Any, state: Any, params: Any, axes: Any, *, step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Any, Any]:
        """One step for every parameter; see `t5x.optimizers.Optimizer`."""
        if self.global_norm_clip_threshold is not None:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(_precision(g)))) for g in jax.tree.leaves(grads)))
            factor = jnp.minimum(1.0, self.global_norm_clip_threshold / norm)
            grads = jax.tree.map(lambda g: g * factor, grads)
        decay = 1.0 - (step - self.step_offset + 1.0) ** -self.decay_rate
        mask = self.weight_decay_mask or (lambda params: jax.tree.map(lambda _: True, params))

        def one(path, param, axes, grad, slots, decayed):
            plan = self.plan(path, param.shape, axes)
            grad = grad.astype(_precision(param))
            new_param, new_slots = self._update_one(plan, param, grad, slots, decay, learning_rate, decayed)
            if self.skip_nan_updates:
                finite = jnp.isfinite(new_param) & jnp.isfinite(jnp.square(grad))
                sound = jnp.all(finite, axis=plan.own(param.ndim), keepdims=True)
                new_param = jnp.where(sound, new_param, param)
                dropped = {"v_row": plan.v_row_drops, "v_col": plan.v_col_drops}
                for name in new_slots.keys() - plan.unused(self.beta1):
                    kept = jnp.squeeze(sound, dropped.get(name, ()))
                    new_slots[name] = jnp.where(kept, new_slots[name], slots[name])
            return new_param, new_slots

        both = _map(one, params, axes, grads, state, mask(params))
        is_pair = lambda x: isinstance(x, tuple)
        return jax.tree.map(lambda x: x[0], both, is_leaf=is_pair), jax.tree.map(lambda x: x[1], both, is_leaf=is_pair)

    def _update_one(self, plan: Plan, param, grad, slots, decay, learning_rate, decayed: bool):
        own = plan.own(param.ndim)
        mean = lambda x, dims: jnp.mean(x, axis=dims, keepdims=True)
        rms = lambda x: jnp.sqrt(mean(jnp.square(x), own))

        squared = jnp.square(grad) + self.epsilon1
        new = dict(slots)
        if plan.factored:
            widen = lambda x, drops: jnp.expand_dims(x, drops)
            row = decay * widen(slots["v_row"], plan.v_row_drops) + (1.0 - decay) * mean(squared, plan.v_row_drops)
            col = decay * widen(slots["v_col"], plan.v_col_drops) + (1.0 - decay) * mean(squared, plan.v_col_drops)
            new |= {"v_row": jnp.squeeze(row, plan.v_row_drops), "v_col": jnp.squeeze(col, plan.v_col_drops)}
            step = grad * (row / mean(row, own)) ** -0.5 * col**-0.5
        else:
            moment = decay * slots["v"] + (1.0 - decay) * squared
            new |= {"v": moment}
            step = grad * moment**-0.5
        if self.clipping_threshold is not None:
            step = step / jnp.maximum(1.0, rms(step) / self.clipping_threshold)
        scale = learning_rate
        if self.multiply_by_parameter_scale:
            size = jnp.maximum(rms(param), self.epsilon2)
            scale = scale * (size if self.max_parameter_scale is None else jnp.minimum(size, self.max_parameter_scale))
        step = step * scale
        if self.beta1 is not None:
            step = self.beta1 * slots["m"].astype(step.dtype) + (1.0 - self.beta1) * step
            new |= {"m": step.astype(self.dtype_momentum)}
        if self.weight_decay_rate is not None and decayed:
            rate = self.weight_decay_rate
            if self.weight_decay_rate_lr_exponent is not None:
                rate = rate * learning_rate**self.weight_decay_rate_lr_exponent
            param = (1.0 - rate) * param
        return param - step, new


def _map(fn, params: Any, axes: Any, *rest: Any) -> Any:
    """fn(path, param, axes, *rest) over the leaves of `params`; the other trees have a value (or a tree) there."""
    leaves, treedef = jax.tree.flatten(params)
    columns = [treedef.flatten_up_to(tree) for tree in (axes, *rest)]
    values = [fn(*row) for row in zip(_paths(params), leaves, *columns, strict=True)]
    return treedef.unflatten(values)


def _paths(params: Any) -> list[str]:
    return ["/".join(str(key.key) for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]


def _precision(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
