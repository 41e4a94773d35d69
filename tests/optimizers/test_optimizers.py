"""Optax's optimizers in the trainer: compared with Optax and PyTorch, on several meshes, and in checkpoints."""

import dataclasses
import functools
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from t5x import configuration, optimizers
from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, tree
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.model_description import sidecars
from t5x.optimizers import OptaxWrapper, applied_schedule
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner, standard_logical_axis_rules
from t5x.trainer import StateLayout
from t5x.trainer.restore import restore_state
from tests.support import commands, tiny
from tests.support.marks import mark_slow
from tests.support.paths import REPO
from tests.support.programs import losses, run_python

NAMES = [
    "adabelief", "adagrad", "adam", "adamw", "fromage", "lamb", "lars", "lion", "muon", "noisy_sgd", "radam", "rmsprop",
    "sgd", "yogi",
]  # fmt: skip
MATRICES = {"mlp": {"kernel": contrib.MuonDimensionNumbers()}, "norm": {"scale": None}, "table": None}
ARGUMENTS = {
    "adamw": {"weight_decay": 0.1},
    "muon": {"weight_decay": 0.1, "muon_weight_dimension_numbers": MATRICES},
    "noisy_sgd": {"key": 3},
    "rmsprop": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "nesterov": True},
}
AXES = {"mlp": {"kernel": ("embed", "mlp")}, "norm": {"scale": ("embed",)}, "table": ("vocab", "embed")}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.01, 0.1, 5, 30)


def initial(size: int = 8) -> dict:
    rng = np.random.default_rng(0)
    shapes = {"mlp": {"kernel": (size, 2 * size)}, "norm": {"scale": (size,)}, "table": (4 * size, size)}
    sample = lambda shape: rng.normal(size=shape).astype(np.float32)
    return jax.tree.map(sample, shapes, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def gradients(step: int, size: int = 8) -> dict:
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), initial(size))


def run(optimizer, steps: int, *, rate=SCHEDULE, params=None, grads=gradients, axes=AXES, state=None):
    """Return parameters and state after `steps` steps with the trainer's schedule `rate`."""
    params = initial() if params is None else params
    update = jax.jit(lambda g, s, p, t: optimizer.update(g, s, p, axes, step=t, learning_rate=rate(t)))
    state = optimizer.init(params, axes) if state is None else state
    for step in range(steps):
        params, state = update(grads(step), state, params, jnp.int32(step))
    return jax.device_get((params, state))


def run_optax(transformation, steps: int) -> dict:
    params = initial()
    state = transformation.init(params)

    @jax.jit
    def update(grads, state, params):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        params, state = update(gradients(step), state, params)
    return params


def assert_close(found, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)


# --- Equality with Optax ----------------------------------------------------------------------------------------------


# One function wraps them all; those with arguments of their own stay.
@pytest.mark.parametrize(
    "name", mark_slow(NAMES, slow=["adabelief", "adagrad", "fromage", "lamb", "lars", "radam", "yogi"])
)
def test_twenty_steps_equal_optax(name):
    """With the rate in the optimizer, and with the same rate from the trainer."""
    arguments = ARGUMENTS.get(name, {})
    expected = run_optax(getattr(contrib if name == "muon" else optax, name)(SCHEDULE, **arguments), 20)
    ours = getattr(optimizers, name)
    own, driven = ours(SCHEDULE, **arguments), ours(**arguments)
    assert driven.learning_rate_fn is None
    np.testing.assert_allclose(own.learning_rate_fn(7), SCHEDULE(7))
    assert_close(run(own, 20, rate=lambda t: 99.0)[0], expected, rtol=1e-6, atol=1e-7)
    assert_close(run(driven, 20)[0], expected, rtol=1e-6, atol=1e-7)


def test_adamw_equals_pytorch():
    import torch  # here, because the program with eight devices imports this module

    parameters = {
        k: torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for k, v in tree.flatten(initial()).items()
    }
    theirs = torch.optim.AdamW(parameters.values(), lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(20):
        theirs.param_groups[0]["lr"] = float(SCHEDULE(step))
        for name, grad in tree.flatten(gradients(step)).items():
            parameters[name].grad = torch.tensor(grad, dtype=torch.float64)
        theirs.step()
    found, _ = run(optimizers.adamw(b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1), 20)
    for name, value in tree.flatten(found).items():
        np.testing.assert_allclose(value, parameters[name].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_chains_with_and_without_a_rate():
    expected = run_optax(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(SCHEDULE)), 5)
    own = optimizers.chain([optax.clip_by_global_norm(0.5), optimizers.adam(SCHEDULE)])
    driven = optimizers.chain([optax.clip_by_global_norm(0.5), optimizers.adam()])
    around = optimizers.clip_by_global_norm(optimizers.adam(), 0.5)
    for optimizer in (own, driven, around):
        assert_close(run(optimizer, 5)[0], expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(UserError, match=r"transformations.*Adafactor.*global_norm_clip_threshold"):
        optimizers.chain([optax.clip(1.0), Adafactor()])
    with pytest.raises(UserError, match=r"dpsgd.*per-example"):
        optimizers.dpsgd(0.1, 1.0, 1.0, 0)


def test_muon_updates_hidden_matrices_and_every_layer_of_a_stack_separately():
    """Three layers, separate and stacked along axis 1."""
    names = {"kernel": ("embed", "mlp"), "scale": ("embed",)}
    rng = np.random.default_rng(0)
    apart, grads = (
        {f"l{i}": {"kernel": rng.normal(size=(6, 4)), "scale": rng.normal(size=6)} for i in range(3)} for _ in "12"
    )
    stack = lambda layers: jax.tree.map(lambda *x: np.stack(x, axis=1).astype(np.float32), *layers.values())
    optimizer = optimizers.muon(weight_decay=0.1)
    axes = {layer: names for layer in apart}
    stacked_axes = {name: (axis[0], "layers", *axis[1:]) for name, axis in names.items()}
    found, state = run(optimizer, 3, params=stack(apart), grads=lambda step: stack(grads), axes=stacked_axes)
    expected, _ = run(optimizer, 3, params=tiny.as_float32(apart), grads=lambda step: tiny.as_float32(grads), axes=axes)
    assert_close(found, stack(expected), rtol=1e-5, atol=1e-6)
    held_by = {name: inner["inner_state"]["0"]["mu"].keys() for name, inner in state["inner_states"].items()}
    assert held_by == {"muon": {"kernel"}, "adam": {"scale"}}


# --- State: names, axes, checkpoints ----------------------------------------------------------------------------------


def test_state_has_t5x_names_and_the_axes_of_its_parameters():
    optimizer = optimizers.chain([optax.clip(1.0), optax.adamw(SCHEDULE)], learning_rate=SCHEDULE)
    params = initial()
    state = tree.flatten(optimizer.init(params, AXES))
    assert set(state) == {
        "1/0/count", "1/2/count", *(f"1/0/{moment}/{path}" for moment in ("mu", "nu") for path in tree.flatten(params))
    }  # fmt: skip
    axes = optimizer.state_axes(params, AXES)
    assert axes["1"]["0"]["mu"] == axes["1"]["0"]["nu"] == AXES
    assert axes["1"]["2"]["count"] == ()


def test_axes_of_factored_and_third_party_state():
    wide = {"wide": jnp.zeros((300, 256)), "other": jnp.zeros((300, 512))}
    axes = {"wide": ("embed", "mlp"), "other": ("embed", "vocab")}
    odd = optax.GradientTransformation(
        lambda params: {
            "shape": jnp.zeros((300, 256)), "unlike": jnp.zeros((7, 20_000)), "table": jnp.zeros((3, 3)),
            "key": jax.random.key(0),
        },
        lambda updates, state, params=None: (updates, state),
    )  # fmt: skip
    optimizer = OptaxWrapper(optax.chain(optax.scale_by_factored_rms(), odd), learning_rate=0.1)
    found = optimizer.state_axes(wide, axes)
    shapes = jax.tree.map(lambda x: x.shape, optimizer.init(wide, axes))
    for name in wide:
        for slot in ("v_row", "v_col"):
            size = {"embed": 300, "mlp": 256, "vocab": 512}
            assert [size[axis] for axis in found["0"][slot][name]] == list(shapes["0"][slot][name])
    assert found["0"]["v"]["wide"] == (None,) and shapes["0"]["v"]["wide"] == (1,)
    assert found["1"] == {"shape": ("embed", "mlp"), "unlike": (None, None), "table": (None, None), "key": (None,)}


def sharded(path: str) -> None:
    """Take steps on eight devices and write the parameters; runs in its own process."""
    partitioner = PjitPartitioner(num_partitions=4, logical_axis_rules=standard_logical_axis_rules(1, 2))
    assert partitioner.mesh.size == 8

    def place(values, axes):
        return jax.tree.map(lambda x, a: jax.device_put(x, partitioner.sharding(x.shape, a)), values, axes)

    found = {}
    for name, optimizer in sharded_optimizers().items():
        params = initial(16)
        state = place(optimizer.init(params, AXES), optimizer.state_axes(params, AXES))
        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (16, 32)]
        assert all(moment.addressable_shards[0].data.shape == (8, 8) for moment in moments)
        assert len(moments) == {"adamw": 2, "factored": 0}.get(name, 1)
        params, _ = run(optimizer, 2, params=place(params, AXES), grads=lambda step: gradients(step, 16), state=state)
        found |= {f"{name}/{key}": value for key, value in tree.flatten(params).items()}
    np.savez(path, **found)


def sharded_optimizers() -> dict:
    return {
        "adamw": optimizers.chain([optax.clip_by_global_norm(1.0), optimizers.adamw(weight_decay=0.1)]),
        "muon": optimizers.muon(),
        "factored": OptaxWrapper(optax.adafactor(0.01, min_dim_size_to_factor=16), learning_rate=0.01),
        "adafactor, frozen": optimizers.freeze(Adafactor(), ["norm/.*"]),
    }


def test_eight_devices_take_the_same_steps(tmp_path):
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    program = f"from tests.optimizers.test_optimizers import sharded; sharded({str(tmp_path / 'found.npz')!r})"
    env = {**os.environ, "XLA_FLAGS": flags}
    done = run_python("-c", program, env=env, cwd=REPO)
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(tmp_path / "found.npz")
    for name, optimizer in sharded_optimizers().items():
        params, _ = run(optimizer, 2, params=initial(16), grads=lambda step: gradients(step, 16))
        for key, value in tree.flatten(params).items():
            np.testing.assert_allclose(found[f"{name}/{key}"], value, rtol=1e-4, atol=1e-5, err_msg=f"{name}/{key}")


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_an_adamw_checkpoint_loads_into_scanned_and_unrolled_layers(tmp_path, scan):
    """The next step with the restored moments is the same."""

    def layout_of(scan_layers):
        config = dataclasses.replace(tiny.BYTES, num_encoder_layers=2, scan_layers=scan_layers)
        model = tiny.model(config, optimizers.chain([optax.clip(1.0), optimizers.adamw(weight_decay=0.1)]))
        return StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))

    def number(keys, leaf):  # differs between entries and arrays
        seed = sum(map(ord, jax.tree_util.keystr(keys)))
        return (jnp.arange(leaf.size).reshape(leaf.shape) + seed) % 97 / 50 + 0.1 if leaf.ndim else jnp.int32(5)

    before, after = layout_of(scan), layout_of(not scan)
    fill = lambda abstract: jax.tree_util.tree_map_with_path(number, abstract)
    arrays = fill(before.abstract.state_dict())
    state = before.state(5, arrays["target"], arrays["state"]["param_states"], {})
    with CheckpointStore(tmp_path) as store:
        store.save(5, state.state_dict(), sidecars=sidecars(before.model, None))
    source = open_checkpoint(str(tmp_path / "checkpoint_5"))
    model = after.model
    restored = restore_state(source, RestoreCheckpointConfig(path=str(tmp_path)), model, after, jax.random.key(0))
    assert int(restored.param_states[1][0].count) == 5

    def next_params(state):
        """Take a step whose gradients are the parameters."""
        return jax.jit(lambda s: s.apply_gradient(s.params, learning_rate=jnp.float32(0.1)))(state).params

    def of_layer(params, tower, layer, *path):
        held = params[tower]
        stacked = tower in held
        value = functools.reduce(lambda node, key: node[key], path, held[tower] if stacked else held[f"layers_{layer}"])
        return value[:, layer] if stacked else value

    one, other = next_params(state), next_params(restored)
    for tower, layers in (("encoder", 2), ("decoder", 1)):
        attention = "attention" if tower == "encoder" else "self_attention"
        for path in [("mlp", "wo", "kernel"), (attention, "out", "kernel"), ("pre_mlp_layer_norm", "scale")]:
            for layer in range(layers):
                values = (of_layer(params, tower, layer, *path) for params in (one, other))
                np.testing.assert_allclose(*values, rtol=1e-6, err_msg=f"{tower} {layer} {path}")
    np.testing.assert_allclose(one["token_embedder"]["embedding"], other["token_embedder"]["embedding"], rtol=1e-6)


# --- Logged learning rate ---------------------------------------------------------------------------------------------


@pytest.fixture
def from_gin(tmp_path):
    """Return a function from the content of a gin file to the optimizer that it binds to OPTIMIZER."""

    def value_of(value):
        return value

    def parsed(text):
        imports = ["__gin__ import dynamic_registration", "t5x import adafactor", "t5x import optimizers"]
        lines = [*(f"from {line}" for line in imports), "import optax", text]
        (tmp_path / "optimizer.gin").write_text("\n".join(lines))
        configuration.clear()
        options = {"search_paths": [], "entry_points": {"value_of": value_of}}
        files = [str(tmp_path / "optimizer.gin")]
        configuration.parse(gin_files=files, bindings=["value_of.value = %OPTIMIZER"], **options)
        configuration.check(value_of)
        return configuration.configured(value_of)()

    yield parsed
    configuration.clear()


COSINE = """
optax.warmup_cosine_decay_schedule:
  init_value = 0.01
  peak_value = 0.1
  warmup_steps = 5
  decay_steps = 30
OPTIMIZER = @optimizers.chain()
"""


@pytest.mark.parametrize(
    "chain",
    [
        "[@optax.clip(), @optax.adamw()]",
        "[@optax.clip(), @optax.masked()]\noptax.masked.inner = @optax.adamw()\noptax.masked.mask = True",
        "[@optax.clip(), @optimizers.adamw()]\noptimizers.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()",
    ],
    ids=["in a chain", "nested", "of t5x"],
)
def test_the_rate_of_a_gin_file_is_logged(from_gin, chain, caplog):
    rate = "optax.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()\noptax.clip.max_delta = 1.0\n"
    optimizer = from_gin(f"{COSINE}{rate}optimizers.chain.transformations = {chain}")
    state = optimizer.init(initial(), AXES)
    with caplog.at_level(logging.WARNING):
        schedule = applied_schedule(optimizer, SCHEDULE, state, 0)
        assert not caplog.records  # the trainer's schedule is the same
        applied_schedule(optimizer, lambda step: 0.5, state, 0)
    assert "learning_rate_fn is ignored" in caplog.text and "0.01 instead of 0.5 at step 0" in caplog.text
    for step in (0, 3, 17):
        np.testing.assert_allclose(schedule(step), SCHEDULE(step), rtol=1e-6)
    expected = run_optax(optax.chain(optax.clip(1.0), optax.adamw(SCHEDULE)), 3)
    assert_close(run(optimizer, 3, rate=lambda t: 99.0)[0], expected, rtol=1e-6, atol=1e-7)


def test_a_missing_rate_is_reported_by_its_gin_name(from_gin):
    with pytest.raises(UserError, match=r"`optax\.adamw` needs `learning_rate`"):
        from_gin("OPTIMIZER = @optimizers.chain()\noptimizers.chain.transformations = [@optax.adamw()]")


def test_without_a_rate_of_its_own_the_trainers_is_logged(from_gin, caplog):
    optimizer = from_gin("OPTIMIZER = @optimizers.lion()\noptimizers.lion.b1 = 0.8")
    with caplog.at_level(logging.WARNING):
        assert applied_schedule(optimizer, SCHEDULE, optimizer.init(initial(), AXES), 0) is SCHEDULE
        assert applied_schedule(Adafactor(), SCHEDULE, {}, 0) is SCHEDULE
    assert not caplog.records


def test_the_logged_rate_counts_as_the_optimizer_does():
    """Fine-tuning at step 1000 with a fresh optimizer state: Optax's schedule starts at 0."""
    optimizer = optimizers.freeze(optimizers.sgd(SCHEDULE), ["norm/scale"])
    params = initial()
    state = optimizer.init(params, AXES)
    schedule = applied_schedule(optimizer, SCHEDULE, state, 1000)
    for step in range(1000, 1004):
        at = {"step": jnp.int32(step), "learning_rate": jnp.float32(99.0)}
        new, state = optimizer.update(gradients(step), state, params, AXES, **at)
        moved = (params["table"] - new["table"]) / gradients(step)["table"]
        np.testing.assert_allclose(np.median(moved), schedule(step), rtol=1e-4)
        params = new


def test_an_unknown_rate_is_logged_as_nan(caplog):
    hidden = OptaxWrapper(optax.sgd(0.1))
    with caplog.at_level(logging.WARNING):
        assert np.isnan(applied_schedule(hidden, SCHEDULE, {}, 0)(3))
    assert "learning_rate is nan" in caplog.text and "optimizers.chain" in caplog.text
    for known in (OptaxWrapper(optax.sgd(0.1), 0.1), optimizers.chain([optax.scale(-0.1)], learning_rate=0.1)):
        np.testing.assert_allclose(applied_schedule(known, SCHEDULE, {}, 0)(3), 0.1)
    for parts in ([optimizers.sgd(0.2)], [OptaxWrapper(optax.clip(0.5)), optimizers.sgd()]):
        with pytest.raises(UserError, match=r"optimizers\.chain\.learning_rate.* 0\.1"):
            optimizers.chain(parts, learning_rate=0.1)


# --- Groups of parameters ---------------------------------------------------------------------------------------------


def part(name: str) -> dict:
    """Return arguments of `run` for a single parameter."""
    only = lambda values: {name: values[name]}
    return {"params": only(initial()), "grads": lambda step: only(gradients(step)), "axes": only(AXES)}


@pytest.mark.parametrize("inner", [Adafactor(beta1=0.9), optimizers.adamw(), optimizers.muon(0.1)], ids=type)
def test_frozen_parameters_are_bitwise_unchanged_and_have_no_state(inner):
    optimizer = optimizers.freeze(inner, ["table", "norm/.*"])
    params, state = run(optimizer, 3)
    for before, after in ((initial()["table"], params["table"]), (initial()["norm"]["scale"], params["norm"]["scale"])):
        assert before.tobytes() == np.asarray(after).tobytes()
    expected, expected_state = run(inner, 3, **part("mlp"))
    assert_close(params["mlp"], expected["mlp"], rtol=1e-6)
    assert tree.flatten(state).keys() == tree.flatten(expected_state).keys()
    assert jax.tree.structure(optimizer.state_axes(initial(), AXES), is_leaf=lambda x: isinstance(x, tuple)) == (
        jax.tree.structure(state)
    )
    assert optimizers.trained(optimizer, initial()).keys() == {"mlp"}


def test_different_optimizers_for_different_parameters():
    slow = optimizers.sgd(0.01)
    optimizer = optimizers.MultiOptimizer([("norm/.*", None), ("table", slow), (".*", Adafactor())])
    params, state = run(optimizer, 2)
    assert_close(params["table"], run(slow, 2, **part("table"))[0]["table"], rtol=1e-6)
    assert_close(params["mlp"], run(Adafactor(), 2, **part("mlp"))[0]["mlp"], rtol=1e-6)
    np.testing.assert_array_equal(params["norm"]["scale"], initial()["norm"]["scale"])
    assert state.keys() == {"0", "1"} and not state["0"]  # SGD has none


def test_clipping_ignores_frozen_gradients():
    clipped = optimizers.clip_by_global_norm(optimizers.freeze(optimizers.sgd(1.0), ["table", "norm/.*"]), 0.5)
    params, _ = run(clipped, 1)
    moved = initial()["mlp"]["kernel"] - params["mlp"]["kernel"]
    np.testing.assert_allclose(np.linalg.norm(moved), 0.5, rtol=1e-5)


def test_weight_decay_mask_of_optax_in_gin(from_gin):
    zeros = jax.tree.map(np.zeros_like, initial())
    for name, mask in (("adamw", "mask"), ("lars", "weight_decay_mask"), ("muon", "weight_decay_mask")):
        optimizer = from_gin(
            f"OPTIMIZER = @optimizers.{name}()\noptimizers.{name}.weight_decay = 0.5\n"
            f"optimizers.{name}.{mask} = @optimizers.weight_decay_mask()\n"
            "optimizers.weight_decay_mask.exclude = ['norm/scale']"
        )
        params, _ = run(optimizer, 1, grads=lambda step: zeros, rate=lambda t: 0.1)
        np.testing.assert_array_equal(params["norm"]["scale"], initial()["norm"]["scale"], err_msg=name)
        assert not np.array_equal(params["mlp"]["kernel"], initial()["mlp"]["kernel"]), name


def test_invalid_patterns_are_rejected():
    every = {
        r"optimizers\.freeze\.patterns: 'mlp/kernal'.* mlp/kernel": ["mlp/kernal"],
        r"optimizers\.freeze\.patterns: 'scale'.* norm/scale": ["scale"],
        r"optimizers\.freeze\.patterns: '\('.*regular expression": ["("],
        "optimizers.freeze.patterns: every parameter": [".*"],
    }
    for message, patterns in every.items():
        with pytest.raises(UserError, match=message):
            optimizers.freeze(Adafactor(), patterns).init(initial(), AXES)
    with pytest.raises(UserError, match=r"patterns_and_optimizers.*norm/scale.*'.[*]'"):
        optimizers.MultiOptimizer([("mlp/.*", Adafactor()), ("table", None)]).init(initial(), AXES)
    with pytest.raises(UserError, match=r"weight_decay_mask\.exclude: 'scale'.*norm/scale"):
        optimizers.adamw(mask=optimizers.weight_decay_mask(["scale"])).init(initial(), AXES)


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_runs_of_the_gin_files(tmp_path, capsys, name):
    """A small network: two steps, and a third after a restart."""
    overrides = [
        "--gin.MIXTURE_OR_TASK_MODULE=t5x.examples.demo.dates", "--gin.MIXTURE_OR_TASK_NAME=dates",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 11}", "--gin.VOCABULARY=@seqio.ByteVocabulary()",
        *(f"--gin.network.T5Config.{field}=1" for field in ("num_encoder_layers", "num_decoder_layers", "num_heads")),
        *(f"--gin.network.T5Config.{field}=8" for field in ("emb_dim", "head_dim", "mlp_dim")),
        "--gin.network.T5Config.vocab_size=384", "--gin.network.T5Config.dropout_rate=0.0", "--gin.BATCH_SIZE=4",
        "--gin.train.infer_eval_dataset_cfg=None",
        "--gin.train.train_eval_dataset_cfg=None", "--gin.train.stats_period=1", "--gin.USE_HARDWARE_RNG=False",
        "--gin.optax.warmup_cosine_decay_schedule.warmup_steps=2",
        "--gin.optax.warmup_cosine_decay_schedule.decay_steps=10",
    ]  # fmt: skip
    for steps in (2, 3):
        file = f"t5x/examples/t5/t5_1_1/examples/base_wmt_from_scratch_{name}.gin"
        model_dir = tmp_path / "run"
        flags = [f"--gin_file={file}", f"--gin.MODEL_DIR={model_dir}", f"--gin.TRAIN_STEPS={steps}"]
        done = commands.run(capsys, "train", *flags, *overrides)
        assert done.code in (0, None), done.err
        assert "learning_rate_fn is ignored" not in done.err
        peak = {"adamw": 3e-4, "lion": 1e-4}[name]
        rates = list(losses(model_dir, "learning_rate").values())
        np.testing.assert_allclose(rates, [0.0, peak / 2, peak][:steps], rtol=1e-6)
    arrays = open_checkpoint(str(model_dir / "checkpoint_3")).arrays
    assert int(arrays["state/param_states/1/0/count"].read()) == 3
    assert "state/param_states/1/0/mu/encoder/layers_0/mlp/wo/kernel" in arrays


@pytest.mark.parametrize("optimizer", [optimizers.sgd(), optimizers.noisy_sgd(key=0)], ids=["no state", "random keys"])
def test_checkpoints_store_any_kind_of_state(tmp_path, optimizer):
    model = tiny.model(optimizer=optimizer)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))
    state = layout.state(1, tiny.random_params(), optimizer.init(tiny.random_params(), layout.axes), {})
    with CheckpointStore(tmp_path) as store:
        store.save(1, state.state_dict(), sidecars=sidecars(model, None))
    source = open_checkpoint(str(tmp_path / "checkpoint_1"))
    restored = restore_state(source, RestoreCheckpointConfig(path=str(tmp_path)), model, layout, jax.random.key(0))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
