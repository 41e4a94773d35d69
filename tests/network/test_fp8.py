"""FP8 matmuls: their values, gradients and scales; and their history through steps, microbatches and checkpoints."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.model_description import sidecars
from t5x.models import DecoderOnlyModel
from t5x.network import DecoderWrapper, TransformerConfig, fp8
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from t5x.trainer.restore import RunState, restore_or_init, restore_state
from tests.support import tiny
from tests.support.marks import mark_slow
from tests.support.programs import run_python

CONFIG = dataclasses.replace(
    tiny.WIDE, num_encoder_layers=2, num_decoder_layers=1, dropout_rate=0.1, matmul_dtype="fp8"
)  # fmt: skip
WITHOUT = dataclasses.replace(CONFIG, matmul_dtype=None)
SCANNED = dataclasses.replace(CONFIG, scan_layers=True, remat_policy="full")


def error(made, expected):
    made, expected = (np.asarray(x, np.float64) for x in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


def rounded(x, scale, dtype):
    return (np.asarray(x, np.float32) * np.float32(scale)).astype(dtype).astype(np.float32) / np.float32(scale)


def with_gradients(function, x, kernels, cotangents):
    """Return the outputs and the gradients of both arguments, compiled as one program."""

    def run(x, kernels, cotangents):
        outputs, backward = jax.vjp(function, x, kernels)
        return outputs, *backward(cotangents)

    return jax.jit(run)(x, kernels, cotangents)


@pytest.mark.parametrize(
    "shapes, dtype",
    mark_slow(
        {
            "two kernels-float32": ([(64, 48), (64, 32)], "float32"),
            "two kernels-bfloat16": ([(64, 48), (64, 32)], "bfloat16"),
            "fused-float32": ([(64, 2, 24)], "float32"),
            "fused-bfloat16": ([(64, 2, 24)], "bfloat16"),
        },
        slow=["two kernels-bfloat16", "fused-float32"],
    ),
)
def test_matmuls_are_exact_for_the_rounded_operands(dtype, shapes):
    # Multiples of 16: our kernels quantize those on a GPU, where XLA may omit the rounding of others.
    x, *kernels = (array.astype(dtype) for array in tiny.arrays((2, 48, 64), *shapes))
    cotangents = [g.astype(dtype) for g in tiny.arrays(*((2, 48, *shape[1:]) for shape in shapes), scale=1e-6, seed=1)]
    scales = jnp.array([64.0] + [2.0**30] * len(kernels))
    made, to_x, to_kernels = with_gradients(lambda *args: fp8.project(*args, scales), x, kernels, cotangents)

    def exact(x, kernels):
        return [jnp.tensordot(x, kernel, 1, precision="highest") for kernel in kernels]

    wide = lambda arrays: [np.asarray(array, np.float32) for array in arrays]
    power = lambda kernel: 2.0 ** np.floor(np.log2(448 / np.abs(kernel).max()))
    x8 = rounded(x, 64.0, jnp.float8_e4m3fn)
    kernels8 = [rounded(k, power(k), jnp.float8_e4m3fn) for k in wide(kernels)]
    cotangents8 = [rounded(g, 2.0**30, jnp.float8_e5m2) for g in wide(cotangents)]
    for operands, bound in (((x8, kernels8, cotangents8), 0.005), ((*wide([x]), wide(kernels), wide(cotangents)), 0.1)):
        expected, expected_to_x, expected_to_kernels = with_gradients(exact, *operands)
        everything = [*made, to_x, *to_kernels], [*expected, expected_to_x, *expected_to_kernels]
        for one, other in zip(*everything, strict=True):
            assert error(one, other) < bound


def test_the_gradient_of_the_scales_is_the_largest_absolute_values():
    x, first, second = tiny.arrays((6, 8), (8, 4), (8, 4))
    cotangents = tiny.arrays((6, 4), (6, 4), seed=1)
    project = lambda scales, kernels: fp8.project(x, kernels, scales)
    _, found, _ = with_gradients(project, jnp.ones(3), [first, second], cotangents)
    expected = [np.abs(array).max() for array in (x, *cotangents)]
    np.testing.assert_array_equal(found, np.float32(expected))


@pytest.mark.parametrize("amax", [1e-30, 3e-4, 0.9999999, 1.0, 447.9999, 448.0, 1e12])
def test_a_scale_is_the_largest_power_of_two_that_does_not_overflow(amax):
    history = np.zeros((1, 2, fp8.HISTORY), np.float32)
    history[0, 0, [7, 9]] = amax, amax / 2
    forward, backward = np.asarray(jax.jit(fp8.scales)({"x": history})["x"][0]).tolist()
    assert np.log2(forward).is_integer() and backward == 2**16
    assert forward * amax <= 448 and (2 * forward * np.float32(amax) > 448 or forward == 2**60)


def test_values_beyond_the_range_saturate_and_infinity_is_not_hidden():
    x, kernel = np.array([[1e4, -1e4, 3.0], [np.inf, 1.0, 1.0]], np.float32), np.eye(3, dtype=np.float32)
    out = jax.jit(fp8.project)(x, [kernel], np.ones(2, np.float32))[0]
    np.testing.assert_array_equal(out[0], [448, -448, 3])
    assert np.isnan(out[1]).all()


def test_a_history_forgets_its_oldest_step_and_ignores_what_is_not_finite():
    history = np.zeros((1, 2, fp8.HISTORY), np.float32)
    history[0, 0, -1] = 5.0
    made = jax.jit(fp8.next_history)({"x": history}, {"x": np.array([[2.0, np.nan]], np.float32)})
    history = np.asarray(made["x"])
    assert history.max() == history[0, 0, 0] == 2
    assert not history[0, 1].any()


@functools.cache
def layout_of(config=CONFIG):
    model = tiny.model(config)
    return StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))


@functools.cache
def initial_state(config=CONFIG):
    return tiny.random_state(layout_of(config))


@functools.cache
def stepper(config=CONFIG, microbatches=1):
    layout = layout_of(config)
    step = functools.partial(tiny.train_step, layout.model, lambda t: 0.01, microbatches, jax.random.key(0))
    return jax.jit(step)


def batch(seed):
    return tiny.batch(seed, rows=4, vocab=CONFIG.vocab_size)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_every_matmul_of_scanned_and_unrolled_layers_has_a_history():
    found = []
    for config in (CONFIG, SCANNED):
        state, metrics = stepper(config)(initial_state(config), batch(0))
        assert jax.tree.structure(state) == jax.tree.structure(layout_of(config).abstract)
        history = state.flax_mutables["fp8"]
        assert all((x[..., 0] > 0).all() and not x[..., 1:].any() for x in jax.tree.leaves(history))
        found.append((metrics["loss"].compute(), history))
    (loss, one), (other_loss, other) = found
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05), one, other)


@pytest.mark.slow
def test_minimal_rematerialization_keeps_the_results_of_matmuls():
    """Matmuls of a step; besides those of the layers, attention is recomputed."""

    def matmuls(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        traced = stepper(config).trace(initial_state(config), batch(0)).jaxpr
        return sum(
            not equation.params["dimension_numbers"][1][0] for equation in equations(traced, "dot_general")
        )  # fmt: skip

    assert matmuls() == matmuls(remat_policy="minimal") < matmuls(remat_policy="full")


def equations(jaxpr, primitive):
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, primitive)


@pytest.mark.slow
def test_the_history_does_not_depend_on_microbatches():
    (whole, _), (parts, _) = (stepper(CONFIG, n)(initial_state(), batch(0)) for n in (1, 2))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), whole.flax_mutables, parts.flax_mutables
    )  # fmt: skip
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=1e-3)


@pytest.mark.slow
def test_training_in_fp8_follows_training_without_it():
    losses = []
    for config in (WITHOUT, CONFIG):
        state, taken = initial_state(config), []
        for _ in range(30):
            state, metrics = stepper(config)(state, batch(0))
            taken.append(float(metrics["loss_per_nonpadding_target_token"].compute()))
        losses.append(taken)
    exact, made = np.array(losses)
    assert exact[-1] < 0.7 * exact[0]
    np.testing.assert_allclose(made, exact, atol=0.05 * exact[0])


@pytest.mark.parametrize("config", mark_slow({"unrolled": CONFIG, "scanned": SCANNED}, slow=["unrolled"]))
@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, config):
    layout, step, state = layout_of(config), stepper(config), initial_state(config)
    for i in range(3):
        state, _ = step(state, batch(i))
    with CheckpointStore(tmp_path) as store:
        store.save(3, state.state_dict(), sidecars=sidecars(layout.model, None) | RunState(0).sidecars())
        store.wait()
        resumed, _ = restore_or_init(store, None, layout.model, layout, jax.random.key(2))
    assert_same(resumed, state)
    assert_same(step(resumed, batch(3))[0], step(state, batch(3))[0])

    # The history is stored the same way for scanned and unrolled layers. Without FP8 it is ignored.
    source = open_checkpoint(str(tmp_path / "checkpoint_3"))
    for other, expected in ((SCANNED if config is CONFIG else CONFIG, state.flax_mutables), (WITHOUT, {})):
        there = layout_of(other)
        cfg = RestoreCheckpointConfig(path=str(tmp_path))
        assert_same(restore_state(source, cfg, there.model, there, jax.random.key(0)).flax_mutables, expected)


@pytest.mark.slow
def test_a_run_may_change_to_fp8(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(0, initial_state(WITHOUT).state_dict(), sidecars=sidecars(layout_of(WITHOUT).model, None))
    layout, cfg = layout_of(SCANNED), RestoreCheckpointConfig(path=str(tmp_path))
    source = open_checkpoint(str(tmp_path / "checkpoint_0"))
    state = restore_state(source, cfg, layout.model, layout, jax.random.key(0))
    assert_same(state.flax_mutables, layout.fresh_mutables())
    assert np.isfinite(stepper(SCANNED)(state, batch(0))[1]["loss"].compute())


def test_evaluation_and_inference_do_not_use_it():
    plain, model = tiny.model(WITHOUT), tiny.model(CONFIG)
    params = tiny.random_params(CONFIG)
    program = lambda function: jax.jit(function).lower(params, batch(0)).as_text()
    assert program(model.eval_fn) == program(plain.eval_fn)
    assert program(model.predict_batch) == program(plain.predict_batch)


@pytest.mark.slow
def test_a_decoder_only_network_trains_in_fp8():
    config = TransformerConfig(
        vocab_size=64, emb_dim=32, num_heads=2, head_dim=16, mlp_dim=32, num_layers=1, matmul_dtype="fp8"
    )
    other = tiny.model()
    model = DecoderOnlyModel(DecoderWrapper(config), other.output_vocabulary, other.optimizer_def)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    decoder = {name: x for name, x in tiny.batch().items() if name.startswith("decoder")}
    step = functools.partial(tiny.train_step, model, lambda t: 0.01, 1, jax.random.key(0))
    state, metrics = jax.jit(step)(tiny.random_state(layout), decoder)
    assert np.isfinite(metrics["loss"].compute())
    assert all((x[..., 0] > 0).all() for x in jax.tree.leaves(state.flax_mutables))


@pytest.mark.parametrize("changes", [{"matmul_dtype": "int8"}, {"matmul_dtype": "fp8", "dtype": "float16"}])
def test_impossible_settings_raise_user_error(changes):
    with pytest.raises(UserError, match="matmul_dtype"):
        dataclasses.replace(tiny.T5_1_1, **changes)


ON_DEVICES = """
import jax, json
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.network.test_fp8 import CONFIG, batch
from tests.support import tiny
model, partitioner = tiny.model(CONFIG), PjitPartitioner(preset="fsdp")
layout = StateLayout.of(model, partitioner, model.input_shapes({"inputs": 9, "targets": 7}))
assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(layout.abstract.params))
trainer = tiny.trainer(layout, tiny.random_state(layout), jax.random.key(0), lambda t: 0.01)
trainer.step(batch(0))
print(json.dumps([x[..., 0].tolist() for x in jax.tree.leaves(trainer.train_state.flax_mutables)]))
"""


@pytest.mark.slow
def test_devices_that_share_rows_and_parameters_find_the_history_of_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = run_python("-c", ON_DEVICES, env=os.environ | {"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr[-2000:]
    history = stepper()(initial_state(), batch(0))[0].flax_mutables
    for there, here in zip(json.loads(done.stdout.splitlines()[-1]), jax.tree.leaves(history), strict=True):
        np.testing.assert_allclose(there, here[..., 0], rtol=0.02)
