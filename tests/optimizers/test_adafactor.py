"""Adafactor against an independent float64 NumPy implementation of its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.optimizers import MultiOptimizer, weight_decay_mask
from t5x.optimizers.adafactor import HEURISTIC_RULE, Adafactor, FactorDim, HParamMap, standard_logical_factor_rules
from t5x.trainer.train_state import FlaxOptimTrainState
from tests.reference import adafactor_numpy

PARAMETERS = {
    "factored": ((128, 130), ("embed", "mlp")),
    "factored, rows longer": ((130, 128), ("embed", "mlp")),
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
    "no clipping, absolute": {"clipping_threshold": None, "multiply_by_parameter_scale": False},
    "clipping, weight decay": {"clipping_threshold": 0.3, "weight_decay_rate": 0.01},
    "momentum, scale limits": {"beta1": 0.9, "max_parameter_scale": 0.8, "epsilon2": 0.5},
    "unfactored, offset": {"factored": False, "step_offset": 2, "decay_rate": 0.6},
    "factor map": {"factor_map": {"vector": "N", "stacked": "NBN", "no axes": "RC", "too small to factor": "CR"}},
    "norm, decay by the rate": {
        "global_norm_clip_threshold": 50.0, "weight_decay_rate": 0.5, "weight_decay_rate_lr_exponent": 1.5,
        "beta1": 0.5,
    },
}  # fmt: skip
KINDS = {"B": FactorDim.BATCH, "R": FactorDim.ROW, "C": FactorDim.COLUMN, "N": FactorDim.NONE}
STEPS = 50
RATE = lambda step: 0.02 / (1 + step) ** 0.5


@functools.cache
def _gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    grads = {}
    for number, (name, (shape, _)) in enumerate(PARAMETERS.items()):
        grads[name] = 10.0 ** (number - 4) * (1 + step % 7) * rng.normal(size=shape) * np.exp(rng.normal(size=shape))
    return grads


def gradients(step: int) -> dict[str, np.ndarray]:
    """Gradients of very different magnitude between parameters, entries and steps."""
    return {name: grad.copy() for name, grad in _gradients(step).items()}


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(99)
    return {
        name: 10.0 ** (n % 3 - 2) * rng.normal(size=shape) for n, (name, (shape, _)) in enumerate(PARAMETERS.items())
    }


def reference(options: dict, spoil=lambda step, grads: None) -> tuple[dict, dict]:
    """Return parameters and slots after all steps by the float64 reference; `spoil` may modify gradients."""
    options = dict(options)
    mapped = {name: [KINDS[k].name for k in kinds] for name, kinds in options.pop("factor_map", {}).items()}
    threshold = options.pop("global_norm_clip_threshold", None)
    structural = {k: v for k, v in options.items() if k in ("beta1", "factored")}
    params, slots = initial(), {}
    for name, (shape, axes) in PARAMETERS.items():
        slots[name] = adafactor_numpy.init_slots(shape, axes, kinds=mapped.get(name), **structural)
    for step in range(options.get("step_offset", 0), options.get("step_offset", 0) + STEPS):
        grads = gradients(step)
        spoil(step, grads)
        if threshold is not None:
            grads = dict(zip(grads, adafactor_numpy.clip_by_global_norm(list(grads.values()), threshold), strict=True))
        for name, (_, axes) in PARAMETERS.items():
            params[name], slots[name] = adafactor_numpy.update(
                params[name], grads[name], slots[name], step, RATE(step), axes=axes, kinds=mapped.get(name), **options
            )
    return params, slots


def ours(options: dict, dtype, spoil=lambda step, grads: None) -> tuple[dict, dict]:
    """Return the same by `Adafactor`."""
    options = dict(options)
    if "factor_map" in options:
        options["factor_map"] = {n: tuple(KINDS[k] for k in kinds) for n, kinds in options["factor_map"].items()}
    optimizer = Adafactor(**options, dtype_momentum=dtype)
    axes = {name: axes for name, (_, axes) in PARAMETERS.items()}
    on_device = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    params = on_device(initial())
    state = optimizer.init(params, axes)
    update = jax.jit(lambda g, s, p, t, lr: optimizer.update(g, s, p, axes, step=t, learning_rate=lr))
    for step in range(options.get("step_offset", 0), options.get("step_offset", 0) + STEPS):
        grads = gradients(step)
        spoil(step, grads)
        params, state = update(on_device(grads), state, params, jnp.int32(step), jnp.asarray(RATE(step), dtype))
    return jax.device_get((params, state))


@pytest.mark.parametrize("options", OPTIONS)
def test_fifty_steps_in_float64(options):
    """Only float64 rounding may differ."""
    expected, expected_slots = reference(OPTIONS[options])
    with jax.enable_x64(True):
        found, slots = ours(OPTIONS[options], jnp.float64)
    for name in PARAMETERS:
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-10, atol=1e-13, err_msg=name)
        assert set(slots[name]) == {"m", "v", "v_row", "v_col"}
        for slot, value in slots[name].items():
            np.testing.assert_allclose(value, expected_slots[name][slot], rtol=1e-10, err_msg=f"{name} {slot}")


@pytest.mark.parametrize("options", ["default", pytest.param("norm, decay by the rate", marks=pytest.mark.slow)])
def test_fifty_steps_in_float32(options):
    """float32 has a relative rounding error of 6e-8, a few times per step.

    Over 50 steps the error is below 50 · 4 · 6e-8 = 1.2e-5 of the parameter's largest entry.
    """
    expected, _ = reference(OPTIONS[options])
    found, slots = ours(OPTIONS[options], jnp.float32)
    for name in PARAMETERS:
        assert found[name].dtype == slots[name]["v"].dtype == np.float32
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1.2e-5 * np.abs(expected[name]).max())


def test_nonfinite_gradients_are_skipped():
    def spoil(step, grads):
        if step % 5 == 1:
            grads["vector"][3] = np.nan
        if step % 5 == 2:
            grads["stacked"][0, 1, 0] = np.inf
            grads["factored"][7, 9] = 1e200  # its square is not finite
        if step % 5 == 3:
            grads["stacked, unfactored"][2, 1, 1] = -np.inf

    options = {"skip_nan_updates": True, "beta1": 0.9}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        expected, expected_slots = reference(options, spoil)
    with jax.enable_x64(True):
        found, slots = ours(options, jnp.float64, spoil)
    undisturbed, _ = reference({"beta1": 0.9})
    for name in PARAMETERS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-10, atol=1e-13, err_msg=name)
        for slot, value in slots[name].items():
            assert np.isfinite(value).all()
            np.testing.assert_allclose(value, expected_slots[name][slot], rtol=1e-10, err_msg=f"{name} {slot}")
    np.testing.assert_allclose(found["stacked"][:, 0], undisturbed["stacked"][:, 0], rtol=1e-10)  # another layer
    assert not np.allclose(found["stacked"][:, 1], undisturbed["stacked"][:, 1], rtol=1e-3)


def test_weight_decay_mask():
    params = {name: jnp.full((3,), 2.0) for name in ("kernel", "scale")}
    axes = {name: ("embed",) for name in params}
    optimizer = Adafactor(weight_decay_rate=0.25, weight_decay_mask=weight_decay_mask(["scale"]))
    state = optimizer.init(params, axes)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = optimizer.update(zeros, state, params, axes, step=jnp.int32(0), learning_rate=jnp.float32(0.1))
    np.testing.assert_array_equal(new["kernel"], 1.5)
    np.testing.assert_array_equal(new["scale"], 2.0)


def test_an_invalid_factor_map_is_rejected():
    params, axes = {"mlp": {"kernel": jnp.ones((2, 3))}}, {"mlp": {"kernel": ("embed", "mlp")}}
    with pytest.raises(UserError, match=r"factor_map.*'mlp/kernl'.* mlp/kernel"):
        Adafactor(factor_map={"mlp/kernl": (FactorDim.ROW, FactorDim.COLUMN)}).init(params, axes)
    with pytest.raises(UserError, match=r"factor_map.*mlp/kernel.* 2 .* 1"):
        Adafactor(factor_map={"mlp/kernel": (FactorDim.ROW,)}).init(params, axes)


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


@pytest.mark.parametrize("threshold, norm", [(1.0, 1.0), (200.0, 100.0)])
def test_global_norm_clip_bounds_what_the_moments_see(threshold, norm):
    grads = {"a": jnp.full((4,), 30.0), "b": jnp.full((4,), 40.0)}  # norm 100
    params, axes = jax.tree.map(jnp.ones_like, grads), {"a": ("embed",), "b": ("embed",)}
    optimizer = Adafactor(global_norm_clip_threshold=threshold)
    _, state = optimizer.update(
        grads, optimizer.init(params, axes), params, axes, step=jnp.int32(0), learning_rate=jnp.float32(0.1)
    )
    np.testing.assert_allclose(state["a"]["v"], (0.3 * norm) ** 2, rtol=1e-5)
    np.testing.assert_allclose(state["b"]["v"], (0.4 * norm) ** 2, rtol=1e-5)


def test_axes_that_cannot_be_factored_are_rejected():
    optimizer = Adafactor()
    with pytest.raises(UserError, match=r"'planes' of p .*logical_factor_rules"):
        optimizer.init({"p": jnp.ones((2, 3, 4))}, {"p": ("embed", "planes", "kv")})
    with pytest.raises(UserError, match=r"p .*ROW, COLUMN and NONE"):
        optimizer.init({"p": jnp.ones((2, 3, 4))}, {"p": ("embed", "mlp", "relpos_buckets")})
    with pytest.raises(UserError, match=r"p .*no logical axes.*factor_map"):
        optimizer.init({"p": jnp.ones((2, 3, 4))}, {"p": None})
    rules = standard_logical_factor_rules({"planes": FactorDim.COLUMN})
    state = Adafactor(logical_factor_rules=rules).init({"p": jnp.ones((2, 3, 4))}, {"p": ("embed", "planes", "kv")})
    assert state["p"]["v_row"].shape == (2,) and state["p"]["v_col"].shape == (3, 4)


def test_t5x_methods_take_the_same_steps():
    params, axes = {"mlp": {"wi": jnp.linspace(-1, 1, 24).reshape(4, 6)}}, {"mlp": {"wi": ("embed", "mlp")}}
    grads = jax.tree.map(lambda x: x**2 + 0.1, params)
    definition = Adafactor(learning_rate=0.1, min_dim_size_to_factor=4)
    definition.set_param_axes(axes)
    optimizer = definition.create(params)
    for learning_rate in (None, 0.3):
        state, step, before = optimizer.state.param_states, optimizer.state.step, optimizer.target
        optimizer = optimizer.apply_gradient(grads, learning_rate=learning_rate)
        expected, states = Adafactor(min_dim_size_to_factor=4).update(
            grads, definition.to_stored(state), before, axes, step=step, learning_rate=learning_rate or 0.1
        )
        np.testing.assert_array_equal(optimizer.target["mlp"]["wi"], expected["mlp"]["wi"])
        one, slots = definition.apply_param_gradient(
            step, definition.update_hyper_params(learning_rate=learning_rate), before["mlp"]["wi"], state["mlp"]["wi"],
            grads["mlp"]["wi"], "mlp/wi",
        )  # fmt: skip
        np.testing.assert_array_equal(one, expected["mlp"]["wi"])
        jax.tree.map(np.testing.assert_array_equal, vars(slots), states["mlp"]["wi"])
    assert int(optimizer.state.step) == 2
    again = definition.create(params).restore_state(optimizer.state_dict())
    jax.tree.map(np.testing.assert_array_equal, again, optimizer)


def test_subclasses_override_the_step_of_a_parameter_and_of_all():
    """As projects do that keep statistics among their parameters, or that change gradients before the step."""

    class Assigns(Adafactor):
        def apply_param_gradient(self, step, hyper_params, param, state, grad, path):
            if path.endswith("statistic"):
                return grad, state
            return super().apply_param_gradient(step, hyper_params, param, state, grad, path)

    class Squares(Adafactor):
        def apply_gradient(self, hyper_params, params, state, grads):
            return super().apply_gradient(hyper_params, params, state, jax.tree.map(jnp.square, grads))

    params = {"head": {"statistic": jnp.ones(3)}, "wi": jnp.linspace(-1, 1, 24).reshape(4, 6)}
    grads = jax.tree.map(lambda x: x**2 + 0.1, params)

    def step(optimizer, grads):
        state = FlaxOptimTrainState.create(optimizer, {"params": params})
        return state.apply_gradient(grads, learning_rate=jnp.float32(0.1)).params

    plain, assigned = step(Adafactor(), grads), step(Assigns(), grads)
    np.testing.assert_array_equal(assigned["wi"], plain["wi"])
    np.testing.assert_array_equal(assigned["head"]["statistic"], grads["head"]["statistic"])
    expected = step(Adafactor(), jax.tree.map(jnp.square, grads))
    assert not np.array_equal(expected["wi"], plain["wi"])
    for optimizer in (Squares(), MultiOptimizer(patterns_and_optimizers=[(".*", Squares())])):
        jax.tree.map(np.testing.assert_array_equal, step(optimizer, grads), expected)


def test_hparam_maps():
    shapes = {"stack": (2, 3, 4), "matrix": (4, 6), "plain": (4, 6)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    rules = HParamMap([("stack", ("batch", "row", "column")), ("mat", HEURISTIC_RULE), ("", None)])
    optimizer = Adafactor(factor_map=rules, min_dim_size_to_factor=2)
    state = optimizer.init(params, {name: None for name in params})
    assert state["stack"]["v_row"].shape == (2, 3) and state["stack"]["v_col"].shape == (2, 4)
    assert state["matrix"]["v_row"].shape == (4,) and state["plain"]["v"].shape == (4, 6)
    with pytest.raises(KeyError, match="embedding"):
        HParamMap([("mlp", None)])["embedding"]
    assert rules(params)["plain"] is None
    scale = HParamMap([("matrix", False), (".*", True)])
    new, _ = Adafactor(multiply_by_parameter_scale=scale, factored=False).update(
        params, Adafactor(factored=False).init(params, {n: None for n in params} | {"stack": ("embed", "mlp", "kv")}),
        jax.tree.map(lambda x: 2 * x, params), {n: None for n in params} | {"stack": ("embed", "mlp", "kv")},
        step=jnp.int32(0), learning_rate=0.1,
    )  # fmt: skip
    np.testing.assert_allclose(new["plain"], 2 - 0.1 * 2, rtol=1e-6)  # the step has the scale of the parameter, 2
    np.testing.assert_allclose(new["matrix"], 2 - 0.1, rtol=1e-6)
