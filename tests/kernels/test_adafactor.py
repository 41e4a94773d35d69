"""Adafactor's GPU kernels against float64 NumPy; on a GPU with T5X_TEST_PLATFORM=cuda, elsewhere interpreted."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels import adafactor
from t5x.kernels.choice import use
from t5x.optimizers.adafactor import Adafactor, FactorDim, HParamMap
from tests.kernels.simulated import abstract_h200, nvidia
from tests.reference import adafactor_numpy

PARAMETERS = {
    "wide": ((128, 320), ("embed", "mlp")),
    "tall": ((448, 192), ("mlp", "embed")),
    "square": ((128, 128), ("embed", "joined_kv")),
    "vector": ((768,), ("embed",)),
}
OTHERS = {
    "odd": ((130, 128), ("embed", "mlp")),
    "too small to factor": ((64, 64), ("embed", "mlp")),
    "odd vector": ((40,), ("embed",)),
    "stacked": ((64, 2, 64), ("embed", "layers", "mlp")),
    "stacked vector": ((256, 2), ("embed", "layers")),
}
STEPS = 10


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the parameters that kernels update, as on one NVIDIA GPU; elsewhere they are interpreted."""
    shapes = []

    def recorded(kernel, param, *args, **settings):
        shapes.append(param.shape)
        return kernel(param, *args, **settings, interpret=jax.default_backend() == "cpu")

    for name in ("update_matrix", "update_vector"):
        kernel = getattr(adafactor, name)
        monkeypatch.setattr(adafactor, name, functools.partial(recorded, kernel))
    with use(nvidia()):
        yield shapes


def gradients(step: int) -> dict[str, np.ndarray]:
    """Gradients of very different magnitude between parameters, entries and steps; some are zero."""
    rng = np.random.default_rng(step)
    made = {}
    for number, (name, (shape, _)) in enumerate({**PARAMETERS, **OTHERS}.items()):
        made[name] = 10.0 ** (number - 7) * (1 + step % 7) * rng.normal(size=shape) * np.exp(rng.normal(size=shape))
        made[name][:3] = 0
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipping_threshold": 0.3, "epsilon2": 0.5, "decay_rate": 0.6},
        {"factor_map": {"wide": (FactorDim.COLUMN, FactorDim.ROW)}},
    ],
    ids=["default", "clipping", "longer rows"],
)
@pytest.mark.slow
def test_ten_steps_are_those_of_float64(calls, options):
    known = {**PARAMETERS, **OTHERS}
    rng = np.random.default_rng(99)
    params = {name: 10.0 ** (n % 4 - 3) * rng.normal(size=shape) for n, (name, (shape, _)) in enumerate(known.items())}
    mapped = {name: [kind.name for kind in kinds] for name, kinds in options.get("factor_map", {}).items()}
    plain = {name: value for name, value in options.items() if name != "factor_map"}
    slots = {
        name: adafactor_numpy.init_slots(shape, axes, kinds=mapped.get(name)) for name, (shape, axes) in known.items()
    }
    axes = {name: axes for name, (_, axes) in known.items()}
    on_device = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    optimizer, found = Adafactor(**options), on_device(params)
    state = optimizer.init(found, axes)
    update = jax.jit(lambda g, s, p, t, lr: optimizer.update(g, s, p, axes, step=t, learning_rate=lr))
    for step in range(STEPS):
        grads, rate = gradients(step), 0.02 / (1 + step) ** 0.5
        found, state = update(on_device(grads), state, found, jnp.int32(step), jnp.float32(rate))
        for name in known:
            params[name], slots[name] = adafactor_numpy.update(
                params[name], grads[name], slots[name], step, rate, axes=axes[name], kinds=mapped.get(name), **plain
            )
    assert sorted(calls) == sorted(shape for shape, _ in PARAMETERS.values())  # traced once
    for name in known:
        assert state[name].keys() == slots[name].keys()
        # float32 rounds to 6e-8, a few times per step.
        np.testing.assert_allclose(found[name], params[name], rtol=0, atol=3e-6 * np.abs(params[name]).max())
        for slot, value in state[name].items():
            np.testing.assert_allclose(value, slots[name][slot], rtol=3e-6, err_msg=f"{name} {slot}")


@pytest.mark.parametrize("shape", [(256,), (128, 192)], ids=str)
@pytest.mark.parametrize("where", ["gradient", "weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_a_parameter_with_a_bad_value_becomes_nan(calls, shape, where, value):
    """As without kernels: means over the parameter are not finite."""
    axes = {"w": ("embed", "mlp")[: len(shape)]}
    good = jnp.ones(shape)
    bad = good.at[(5,) * len(shape)].set(value)
    params, grads = ({"w": bad if where == name else good} for name in ("weight", "gradient"))
    optimizer = Adafactor()
    update = functools.partial(optimizer.update, grads, optimizer.init(params, axes), params, axes)
    new, _ = update(step=jnp.int32(0), learning_rate=jnp.float32(0.1))
    assert calls and not np.isfinite(new["w"]).any()


@pytest.mark.parametrize(
    "options",
    [
        {"beta1": 0.9}, {"weight_decay_rate": 0.01}, {"max_parameter_scale": 1.0}, {"clipping_threshold": None},
        {"skip_nan_updates": True}, {"multiply_by_parameter_scale": False}, {"epsilon2": jnp.float32(1e-3)},
        {"multiply_by_parameter_scale": HParamMap([("w", False)])},
    ],
    ids=lambda options: "-".join(f"{name}={type(value).__name__}" for name, value in options.items()),
)  # fmt: skip
def test_other_settings_are_left_to_xla(calls, options):
    params, axes = {"w": jnp.ones((128, 192))}, {"w": ("embed", "mlp")}
    optimizer = Adafactor(**options)
    at = {"step": jnp.int32(0), "learning_rate": jnp.float32(0.1)}
    jax.eval_shape(lambda: optimizer.update(params, optimizer.init(params, axes), params, axes, **at))
    assert not calls


def test_several_devices_are_left_to_xla(calls):
    params, axes = {"w": jnp.ones((128, 192))}, {"w": ("embed", "mlp")}
    optimizer = Adafactor()
    update = functools.partial(optimizer.update, params, optimizer.init(params, axes), params, axes)
    for count, kernels in ((2, 0), (1, 1)):
        with use(nvidia(count=count)):
            jax.eval_shape(lambda: update(step=jnp.int32(0), learning_rate=jnp.float32(0.1)))
        assert len(calls) == kernels


def test_other_parameters_and_rates_are_left_to_xla(calls):
    params, axes, at = {"w": jnp.ones((128, 192))}, {"w": ("embed", "mlp")}, {"step": jnp.int32(0)}
    optimizer = Adafactor()
    state = optimizer.init(params, axes)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    optimizer.update(params, narrow, params, axes, **at, learning_rate=0.1)
    optimizer.update(params, state, params, axes, **at, learning_rate=jnp.full((128, 1), 0.1))
    assert not calls
    one, _ = optimizer.update(params, state, params, axes, **at, learning_rate=0.1)
    same, _ = optimizer.update(params, state, params, axes, **at, learning_rate=jnp.full((1,), 0.1))
    assert len(calls) == 2
    np.testing.assert_array_equal(one["w"], same["w"])


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((32128, 768), True), ((768, 32128), True), ((4096, 10240), True), ((2048, 5120), True), ((4096,), True),
        ((250112, 768), False), ((32128, 4096), False), ((8192,), False), ((768, 100), False), ((64, 64, 64), False),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_a_program_can_add_up(shape, fits):
    assert adafactor.fits(jax.ShapeDtypeStruct(shape, jnp.float32)) == fits
    assert not adafactor.fits(jax.ShapeDtypeStruct(shape, jnp.bfloat16))


@pytest.mark.parametrize("name", ["update_vector", "update_matrix"])
def test_kernels_lower_for_a_gpu_and_pass_nan_on(name):
    """In Triton, the maximum of NaN and a number is the number; the interpreter does not show it."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    settings = adafactor.KernelSettings(1e-30, 1e-3, 1.0)
    if name == "update_vector":
        arrays, options = [array(768)] * 3, {}
    else:
        arrays, options = [array(128, 320), array(128, 320), array(128), array(320)], {"row_axis": 0}
    kernel = functools.partial(getattr(adafactor, name), settings=settings, **options)
    device = abstract_h200()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(kernel).trace(*arrays, array(2))
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert " max " not in str(traced.jaxpr)
