"""States, optimizers and checkpoints in the hands of code that was written for T5X."""

import dataclasses
import json

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t5x import (
    adafactor,
    checkpoint_importer,
    checkpoints,
    losses,
    metrics,
    optimizers,
    partitioning,
    train_state,
    trainer,
    utils,
)
from t5x.errors import UserError
from t5x.examples.scalable_t5 import layers
from t5x.metrics.accumulators import Metric

RULES = (("embed", None), ("mlp", "model"), ("vocab", "model"), ("batch", "data"))


def variables() -> dict:
    return {
        "params": {"wi": jnp.linspace(-1, 1, 128).reshape(8, 16), "scale": jnp.ones(8)},
        "params_axes": {"wi_axes": AxisMetadata(names=("embed", "mlp")), "scale_axes": AxisMetadata(names=("embed",))},
        "counters": {"n": jnp.zeros(2)},
    }


def test_the_state_of_adafactor_has_attributes_and_its_hyperparameters_can_be_overridden():
    params = variables()["params"]
    definition = adafactor.Adafactor(0.1, beta1=0.9, min_dim_size_to_factor=4)
    optimizer = definition.create(params)
    slots = optimizer.state.param_states["wi"]
    assert (slots.v_row.shape, slots.v_col.shape, slots.v.shape, slots.m.shape) == ((8,), (16,), (1,), (8, 16))
    assert definition.hyper_params.beta1 == 0.9 and definition.hyper_params.factor_map is None

    grads = jax.tree.map(lambda x: x + 0.5, params)
    plain, decayed = optimizer.apply_gradient(grads), optimizer.apply_gradient(grads, weight_decay_rate=0.25)
    np.testing.assert_allclose(decayed.target["wi"], plain.target["wi"] - 0.25 * params["wi"], atol=1e-6)
    assert isinstance(plain.state.param_states["wi"], type(slots)) and int(plain.state.step) == 1
    again = optimizer.restore_state(plain.state_dict())
    jax.tree.map(np.testing.assert_array_equal, again, plain)
    assert plain.state_dict()["state"]["param_states"]["wi"].keys() == {"v_row", "v_col", "v", "m"}


def test_the_state_of_an_optax_optimizer_is_that_of_optax():
    definition = optimizers.OptaxWrapper(optax.adamw(0.1))
    optimizer = definition.create(variables()["params"])
    assert isinstance(optimizer.state.param_states[0], optax.ScaleByAdamState)
    axes = {"wi": PartitionSpec("embed", "mlp"), "scale": PartitionSpec("embed")}
    derived = definition.derive_logical_axes(optimizer, axes)
    moments = derived.state.param_states[0]
    assert moments.mu == moments.nu == derived.target == axes
    assert moments.count is None and derived.state.step is None

    grads = jax.tree.map(jnp.ones_like, optimizer.target)
    stepped = optimizer.apply_gradient(grads)
    stored = stepped.state_dict()["state"]["param_states"]
    assert stored.keys() == {"0"} and int(stored["0"]["count"]) == 1  # without Optax's empty states
    jax.tree.map(np.testing.assert_array_equal, optimizer.restore_state(stepped.state_dict()), stepped)


@pytest.mark.parametrize("make", [lambda: adafactor.Adafactor(0.1), lambda: optimizers.adamw(0.1)])
def test_a_state_of_frozen_variables_stays_frozen(make):
    state = train_state.FlaxOptimTrainState.create(make(), flax.core.freeze(variables()))
    new = state.apply_gradient(jax.tree.map(jnp.ones_like, state.params), 0.1, flax_mutables=state.flax_mutables)
    for found in (state, new, state.restore_state(new.state_dict())):
        assert isinstance(found.params, flax.core.FrozenDict) and isinstance(found.flax_mutables, flax.core.FrozenDict)
        assert isinstance(found.params_axes, flax.core.FrozenDict)
    assert new.state_dict()["target"].keys() == {"wi", "scale"} and type(new.state_dict()["target"]) is dict
    inference = train_state.InferenceState.create(flax.core.freeze(variables()))
    assert isinstance(inference.restore_state(inference.state_dict()).params, flax.core.FrozenDict)
    thawed = train_state.FlaxOptimTrainState.create(make(), variables())
    assert type(thawed.params) is type(thawed.flax_mutables) is dict


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("factored", [True, False])
def test_averages_and_unused_slots_have_no_mesh_axes(factored, beta1):
    optimizer = adafactor.Adafactor(0.1, factored=factored, beta1=beta1, min_dim_size_to_factor=4)
    partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=RULES)
    state = train_state.FlaxOptimTrainState.create(optimizer, variables())
    axes = partitioner.get_mesh_axes(state)
    sharded = PartitionSpec(None, "model")
    assert axes.params == {"wi": sharded, "scale": PartitionSpec(None)} and axes.step is None
    slots = axes.param_states["wi"]
    assert (slots.v_row, slots.v_col) == (None, None)
    assert slots.v == (None if factored else sharded) and slots.m == (None if beta1 is None else sharded)
    placed = partitioner.move_params_to_devices(state, axes)
    jax.tree.map(np.testing.assert_array_equal, placed, state)


def test_an_optimizer_of_the_user_decides_the_axes_of_its_state():
    class Replicated(optimizers.OptimizerDef):
        def __init__(self):
            super().__init__(None)

        def init_state(self, params):
            return optimizers.OptimizerState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

        def derive_logical_axes(self, optimizer, param_logical_axes):
            states = jax.tree.map(lambda _: None, optimizer.target)
            return optimizer.replace(target=param_logical_axes, state=optimizers.OptimizerState(None, states))

    state = train_state.FlaxOptimTrainState.create(Replicated(), variables())
    axes = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=RULES).get_mesh_axes(state)
    assert axes.param_states == {"wi": None, "scale": None} and axes.params["wi"] == PartitionSpec(None, "model")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def state_at(step: int, dtype=jnp.float32) -> train_state.FlaxOptimTrainState:
    params = {"kernel": jnp.arange(8, dtype=dtype).reshape(2, 4)}
    optimizer = optimizers.Optimizer(optimizers.sgd(0.1), optimizers.OptimizerState(np.int32(step), {}), params)
    return train_state.FlaxOptimTrainState(optimizer)


def checkpointer(directory, cls=checkpoints.Checkpointer, **options):
    return cls(state_at(0), partitioning.PjitPartitioner(), str(directory), **options)


def test_parameters_keep_their_stored_dtype_unless_another_is_asked_for(tmp_path):
    checkpointer(tmp_path, save_dtype=jnp.bfloat16).save(state_at(3))
    assert checkpointer(tmp_path).restore().params["kernel"].dtype == jnp.bfloat16
    restored = checkpointer(tmp_path, restore_dtype=jnp.float32).restore(step=3)
    assert restored.params["kernel"].dtype == jnp.float32 and int(restored.step) == 3
    np.testing.assert_array_equal(restored.params["kernel"], state_at(3).params["kernel"])


def test_lazy_states_can_be_read_and_saved(tmp_path):
    checkpointer(tmp_path).save(state_at(3))
    lazy = checkpointer(tmp_path).restore(lazy_parameters=True)
    np.testing.assert_array_equal(lazy.params["kernel"].get(), state_at(3).params["kernel"])
    later = lazy.replace_step(lazy.step.get() + 1)
    checkpointer(tmp_path).save(later)
    np.testing.assert_array_equal(checkpoints.load_t5x_checkpoint(str(tmp_path), step=4)["target"]["kernel"],
                                  state_at(3).params["kernel"])  # fmt: skip


def test_the_number_of_checkpoints_to_keep_can_change(tmp_path):
    saver = checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        saver.save(state_at(step))
    assert saver.all_steps() == [2, 3]
    saver.keep = 1
    saver.save(state_at(4))
    assert saver.all_steps() == [4] and saver.latest_step() == 4


def test_checkpoints_without_metrics_are_the_worst_unless_all_are_kept(tmp_path):
    options = {"metric_name_to_monitor": "train/accuracy", "keep_checkpoints_without_metrics": False}
    saver = checkpointer(tmp_path, checkpoints.SaveBestCheckpointer, keep=2, **options)
    kept = []
    for step in (1, 2, 3, 4):
        saver.save(state_at(step))
        kept.append(saver.all_steps())
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 3, 4]]  # the newest, and two others
    (tmp_path / "train").mkdir()
    lines = [json.dumps({"step": step, "accuracy": value}) for step, value in ((2, 0.9), (3, 0.8), (4, 0.7))]
    (tmp_path / "train" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    saver.save(state_at(5))
    assert saver.all_steps() == [2, 3, 5]
    saver.metric_mode = "min"
    saver.save(state_at(6))
    assert saver.all_steps() == [2, 3, 6]


def test_an_empty_directory_is_not_a_checkpoint(tmp_path):
    for step in (5, 10):
        (tmp_path / f"checkpoint_{step}").mkdir()
    file = tmp_path / "checkpoint_5" / "checkpoint"
    file.touch()
    assert checkpoints.all_steps(str(tmp_path)) == [5] and checkpointer(tmp_path).latest_step() == 5
    assert checkpoints.find_checkpoint(str(tmp_path)) == str(file)
    assert checkpoints.find_checkpoint(str(file), 1000) == str(file)


def test_mismatches_are_also_value_errors(tmp_path):
    checkpointer(tmp_path).save(state_at(3))
    other = dataclasses.replace(state_at(3), _optimizer=state_at(3)._optimizer.replace(target={"kernel": jnp.ones(3)}))
    reader = checkpoints.Checkpointer(other, partitioning.PjitPartitioner(), str(tmp_path))
    for attempt in (
        reader.restore,
        lambda: adafactor.Adafactor().create({"kernel": jnp.ones((2, 3, 4))}),
        lambda: checkpoints.load_t5x_checkpoint(str(tmp_path / "checkpoint_3" / "state" / "d")),
        lambda: partitioning.PjitPartitioner(num_partitions=3 * jax.device_count()),
        lambda: utils.create_learning_rate_scheduler(factors="constant * squared"),
        lambda: losses.convert_special_loss_normalizing_factor_to_enum("MEAN"),
    ):
        with pytest.raises(ValueError) as caught:
            attempt()
        assert isinstance(caught.value, UserError)


def test_shared_position_biases_of_mesh_tensorflow_are_renamed():
    name = "decoder/block_{:03d}/layer_000/SelfAttention/relative_attention_bias"
    rename = lambda found: checkpoint_importer._maybe_correct_relpos_bias(checkpoint_importer.t5_importer.apply(found))
    shared = rename({name.format(0): 1, name.format(0) + "_slot_v": 2})
    bias = "relpos_bias/rel_embedding"
    assert shared == {f"target/decoder/{bias}": 1, f"state/param_states/decoder/{bias}/v": 2}
    each = rename({name.format(0): 1, name.format(11): 2})
    assert each == {f"target/decoder/layers_{layer}/{bias}": value for layer, value in ((0, 1), (11, 2))}


def test_scalars_equal_numbers_and_those_of_clu():
    @dataclasses.dataclass
    class Scalar:  # as in clu.values
        value: float

    found = metrics.Sum.from_model_output(jnp.array([1.0, 2.0])).compute_value()
    assert found == 3.0 and found == Scalar(3.0) and Scalar(3.0) == found and found.value == 3.0
    assert found != Scalar(4.0) and {found: 1}[3.0] == 1


def test_a_summary_has_the_texts_among_the_metrics(tmp_path):
    @dataclasses.dataclass
    class Text:  # as in clu.values
        value: str

    @flax.struct.dataclass
    class Sample(Metric):
        def compute_value(self):
            return Text("a **sample**")

    manager = trainer.MetricsManager("eval", str(tmp_path))
    found = manager.write_metrics_summary({"loss": metrics.Sum(40.0), "sample": Sample()}, step=4, num_steps=2)
    manager.close()
    assert found.result() == {"loss": 40.0, "sample": Text("a **sample**")}
    assert found.result()["sample"].value == "a **sample**"
    assert json.loads((tmp_path / "eval" / "metrics.jsonl").read_text()) == {"step": 4, "loss": 40.0}
    events = EventAccumulator(str(tmp_path / "eval")).Reload()
    (event,) = events.Tensors("sample/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (4, b"a **sample**")


def test_initializers_of_scalable_networks_take_the_axes_of_the_kernel():
    seen = []

    def init(key, shape, dtype, in_axis, out_axis):
        seen.append((shape, in_axis, out_axis))
        return layers.nd_dense_init(1.0, "fan_in", "normal")(key, shape, dtype, in_axis, out_axis)

    x = jnp.ones((2, 3, 8))
    dense = layers.DenseGeneral(features=(4, 8), kernel_init=init)
    assert dense.init_with_output(jax.random.key(0), x)[0].shape == (2, 3, 4, 8)
    assert seen == [((8, 32), 0, 1)]
    attention = layers.MultiHeadDotProductAttention(num_heads=4, head_dim=8, kernel_init=init)
    kernels = attention.init(jax.random.key(0), x, x, deterministic=True)["params"]
    scale = {name: float(jnp.std(kernels[name]["kernel"]) * 8**0.5) for name in ("query", "key")}
    np.testing.assert_allclose([scale["query"] * 8**0.5, scale["key"]], 1.0, rtol=0.2)  # the query includes 1/sqrt(8)
