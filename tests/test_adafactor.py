"""Adafactor against an independent float64 NumPy implementation of its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.adafactor import Adafactor, FactorDim, standard_logical_factor_rules
from t5x.errors import UserError
from tests.reference import adafactor_numpy

PARAMETERS = {
    "factored": ((130, 160), ("embed", "mlp")),
    "factored, rows longer": ((160, 130), ("embed", "mlp")),
    "square": ((128, 128), ("embed", "joined_kv")),
    "too small to factor": ((130, 12), ("embed", "mlp")),
    "vector": ((40,), ("embed",)),
    "stacked": ((12, 3, 16), ("embed", "layers", "mlp")),
    "stacked vector": ((40, 3), ("embed", "layers")),
    "three dimensions": ((20, 4, 6), ("embed", "heads", "kv")),
    "stacked, unfactored": ((3, 5, 32), ("layers", "heads", "relpos_buckets")),
    "no axes": ((9, 5), None),
}
OPTIONS = {
    "default": {},
    "momentum": {"beta1": 0.9},
    "weight decay": {"weight_decay_rate": 0.01},
    "no clipping": {"clipping_threshold": None},
    "absolute": {"multiply_by_parameter_scale": False},
    "unfactored": {"factored": False},
    "largest scale": {"max_parameter_scale": 0.5},
    "offset": {"step_offset": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_ten_steps(name, options):
    shape, axes = PARAMETERS[name]
    options = OPTIONS[options]
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=shape)
    structural = {k: v for k, v in options.items() if k in ("beta1", "factored")}
    slots = adafactor_numpy.init_slots(shape, axes, **structural)
    optimizer = Adafactor(**options)
    params, tree_axes = {"p": jnp.asarray(theirs, jnp.float32)}, {"p": axes}
    state = optimizer.init(params, tree_axes)
    update = jax.jit(lambda g, s, p, t, lr: optimizer.update(g, s, p, tree_axes, step=t, learning_rate=lr))
    first = options.get("step_offset", 0)
    for step in range(first, first + 10):
        grad = rng.normal(size=shape) * (1 + step) * np.exp(rng.normal(size=shape))
        rate = 0.01 / (1 + step)
        theirs, slots = adafactor_numpy.update(theirs, grad, slots, step, rate, axes=axes, **options)
        params, state = update({"p": jnp.asarray(grad, jnp.float32)}, state, params, jnp.int32(step), jnp.float32(rate))
    np.testing.assert_allclose(params["p"], theirs, rtol=2e-5, atol=2e-6)
    assert set(state["p"]) == {"m", "v", "v_row", "v_col"}
    for slot, value in state["p"].items():
        np.testing.assert_allclose(value, slots[slot], rtol=1e-4, atol=1e-6, err_msg=slot)


def test_state_axes_fit_the_state():
    optimizer = Adafactor(beta1=0.9)
    for shape, axes in PARAMETERS.values():
        if axes is None:
            continue
        params, tree_axes = {"p": jnp.ones(shape)}, {"p": axes}
        state, state_axes = optimizer.init(params, tree_axes)["p"], optimizer.state_axes(params, tree_axes)["p"]
        sizes = dict(zip(axes, shape, strict=True))
        for slot, names in state_axes.items():
            assert len(names) == state[slot].ndim
            assert all(state[slot].shape[d] == sizes[n] for d, n in enumerate(names) if n is not None)


def test_skip_nan_updates_leaves_that_parameter_alone():
    optimizer = Adafactor(skip_nan_updates=True)
    params, axes = {"bad": jnp.ones(3), "good": jnp.ones(3)}, {"bad": ("embed",), "good": ("embed",)}
    state = optimizer.init(params, axes)
    grads = {"bad": jnp.array([1.0, jnp.nan, 1.0]), "good": jnp.ones(3)}
    new, new_state = optimizer.update(grads, state, params, axes, step=jnp.int32(0), learning_rate=jnp.float32(0.1))
    np.testing.assert_array_equal(new["bad"], params["bad"])
    np.testing.assert_array_equal(new_state["bad"]["v"], state["bad"]["v"])
    assert (new["good"] < 1).all()


def test_global_norm_clip_bounds_what_the_moments_see():
    grads = {"a": jnp.full((4,), 30.0), "b": jnp.full((4,), 40.0)}  # norm 100
    params, axes = jax.tree.map(jnp.ones_like, grads), {"a": ("embed",), "b": ("embed",)}
    optimizer = Adafactor(global_norm_clip_threshold=1.0)
    _, state = optimizer.update(
        grads, optimizer.init(params, axes), params, axes, step=jnp.int32(0), learning_rate=jnp.float32(0.1)
    )
    np.testing.assert_allclose(state["a"]["v"], 0.3**2, rtol=1e-5)
    np.testing.assert_allclose(state["b"]["v"], 0.4**2, rtol=1e-5)


def test_axes_that_cannot_be_factored_are_told():
    optimizer = Adafactor()
    with pytest.raises(UserError, match="no factor rule for the logical axis 'planes' of p"):
        optimizer.init({"p": jnp.ones((2, 3, 4))}, {"p": ("embed", "planes", "kv")})
    with pytest.raises(UserError, match="mixes ROW, COLUMN and NONE"):
        optimizer.init({"p": jnp.ones((2, 3, 4))}, {"p": ("embed", "mlp", "relpos_buckets")})
    rules = standard_logical_factor_rules({"planes": FactorDim.COLUMN})
    state = Adafactor(logical_factor_rules=rules).init({"p": jnp.ones((2, 3, 4))}, {"p": ("embed", "planes", "kv")})
    assert state["p"]["v_row"].shape == (2,) and state["p"]["v_col"].shape == (3, 4)


def test_the_rate_is_the_schedules():
    with pytest.raises(UserError, match="learning_rate_fn"):
        Adafactor(learning_rate=0.1)
