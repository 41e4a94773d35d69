"""Names that several public projects use behave as T5X documents them."""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec

from t5x import (
    adafactor,
    binary_search,
    checkpoint_utils,
    checkpoints,
    decoding,
    losses,
    metrics,
    models,
    optimizers,
    partitioning,
    state_utils,
    test_utils,
    train_state,
    trainer,
    utils,
)  # fmt: skip
from t5x.checkpoints.formats import open_checkpoint
from t5x.data import ByteVocabulary
from t5x.data.dataset_config import DatasetConfig
from t5x.examples.t5 import layers, network
from tests.compat.t5x_projects import tasks
from tests.support import tiny
from tests.support.marks import mark_slow

# --- losses -----------------------------------------------------------------------------------------------------------

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
TARGETS = jnp.array([[1, 2, 0], [4, 3, 3]])


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_cross_entropy_of_one_hot_targets_is_that_of_tokens(z_loss):
    of_tokens = lambda x: losses.cross_entropy(x, TARGETS, z_loss)[0].sum()
    of_one_hot = lambda x: losses.cross_entropy_with_logits(x, jax.nn.one_hot(TARGETS, 5), z_loss)[0].sum()
    np.testing.assert_allclose(of_tokens(LOGITS), of_one_hot(LOGITS), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(of_tokens)(LOGITS), jax.grad(of_one_hot)(LOGITS), atol=1e-6)
    z_part = losses.cross_entropy_with_logits(LOGITS, jax.nn.one_hot(TARGETS, 5), z_loss)[1]
    np.testing.assert_allclose(z_part, z_loss * np.log(np.exp(LOGITS).sum(-1)) ** 2, rtol=1e-5)


def test_weighted_cross_entropy():
    weights = jnp.array([[1, 1, 0], [1, 0, 0]])
    log_probs = np.asarray(jax.nn.log_softmax(LOGITS))
    expected = -(log_probs[0, 0, 1] + log_probs[0, 1, 2] + log_probs[1, 0, 4])
    loss, z_loss, total = losses.compute_weighted_cross_entropy(LOGITS, TARGETS, weights, loss_normalizing_factor=2)
    np.testing.assert_allclose([loss, z_loss, total], [expected / 2, 0, 3], rtol=1e-6)
    assert float(losses.compute_weighted_cross_entropy(LOGITS, TARGETS)[2]) == 6
    smoothed, _, _ = losses.compute_weighted_cross_entropy(LOGITS, TARGETS, label_smoothing=0.1)
    confidence, low = 0.9, 0.1 / 4
    soft = jax.nn.one_hot(TARGETS, 5) * (confidence - low) + low
    constant = -(confidence * np.log(confidence) + 4 * low * np.log(low))
    np.testing.assert_allclose(smoothed, -(soft * log_probs).sum() - 6 * constant, rtol=1e-5)


def test_normalizing_factors():
    batch = {"decoder_target_tokens": TARGETS, "decoder_loss_weights": jnp.array([[1.0, 1, 0], [1, 0, 0]])}
    of = functools.partial(losses.get_loss_normalizing_factor_and_weights, batch=batch)
    assert of(None)[0] is None and of(7.0)[0] == 7.0 and of(7.0)[1] is batch["decoder_loss_weights"]
    assert float(of("num_real_target_tokens")[0]) == 3 and of("NUM_TOTAL_TARGET_TOKENS")[0] == 6
    factor, weights = of(losses.SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE)
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0], [1, 0, 0]])
    assert float(factor) == 2
    packed = {"decoder_target_tokens": jnp.ones((1, 4), jnp.int32), "decoder_loss_weights": jnp.ones((1, 4)),
              "decoder_segment_ids": jnp.array([[1, 1, 1, 2]])}  # fmt: skip
    factor, weights = losses.get_loss_normalizing_factor_and_weights("average_per_sequence", packed)
    np.testing.assert_allclose(weights, [[1 / 3] * 3 + [1]], rtol=1e-6)
    np.testing.assert_allclose(factor, 2, rtol=1e-6)
    # Without weights, special factors do not count padding; a segment 0 is padding whatever its weights are.
    batch = {"decoder_target_tokens": jnp.array([[5, 6, 7, 0], [5, 0, 0, 0]])}
    real = [[1.0, 1, 1, 0], [1, 0, 0, 0]]
    for name, expected in (("NUM_REAL_TARGET_TOKENS", 4), ("NUM_TOTAL_TARGET_TOKENS", 8)):
        factor, weights = losses.get_loss_normalizing_factor_and_weights(name, batch)
        assert float(factor) == expected
        np.testing.assert_array_equal(weights, real)
        np.testing.assert_allclose(losses.loss_scale(name, batch), np.array(real) / expected)
    packed |= {"decoder_segment_ids": jnp.array([[1, 2, 2, 0]]), "decoder_loss_weights": jnp.array([[4.0, 1, 3, 9]])}
    factor, weights = losses.get_loss_normalizing_factor_and_weights("average_per_sequence", packed)
    np.testing.assert_allclose(weights, [[1, 0.25, 0.75, 0]])
    assert float(factor) == 2


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics():
    assert float(metrics.Sum.from_model_output(jnp.arange(4)).merge(metrics.Sum(1.0)).compute()) == 7
    average = metrics.AveragePerStep.from_model_output(jnp.array([2.0, 4.0]))
    assert float(average.compute()) == 6 and float(average.merge(average).compute()) == 6
    assert float(average.replace_steps(3).compute()) == 2 and float(average.compute_value().value) == 6
    rate = metrics.TimeRate.from_model_output(10.0)
    with pytest.raises(ValueError, match="replace_duration"):
        rate.compute()
    assert rate.merge(rate).replace_duration(4.0).compute() == 5
    per_second = metrics.StepsPerTime.from_model_output(3).merge(metrics.StepsPerTime.from_model_output(1))
    several = {"rate": rate, "steps": per_second, "time": metrics.Time(), "sum": metrics.Sum(1.0)}
    found = metrics.set_time_metrics_duration(several, 2.0)
    assert [found[name].compute() for name in ("rate", "steps", "time", "sum")] == [5, 2, 2, 1]
    with pytest.raises(AssertionError):
        found["rate"].merge(found["rate"])
    shapes = jax.eval_shape(lambda: average)
    assert float(metrics.shape_obj_to_defined_obj(shapes).total) == 0
    assert metrics.is_metric_obj(average) and metrics.is_time_metric(rate) and not metrics.is_time_metric(average)
    assert metrics.create_metrics_dict({"a": 2.0})["a"].compute() == 2
    stacked = jax.tree.map(lambda *x: jnp.stack(x), metrics.Sum(1.0), metrics.Sum(2.0), metrics.Sum(3.0))
    assert float(stacked.reduce().compute()) == 6
    assert float(metrics.Sum.from_output("loss").from_model_output(loss=jnp.ones(3), other=1).compute()) == 3


def test_base_metrics():
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    logits = 5 * jax.nn.one_hot(jnp.array([[1, 3, 0], [4, 0, 0]]), 5)
    found = models.compute_base_metrics(logits, TARGETS, mask, loss=jnp.float32(6.0), z_loss=jnp.float32(1.0))
    found = metrics.set_time_metrics_duration(found, 2.0)
    values = {name: float(metric.compute()) for name, metric in found.items()}
    assert values["accuracy"] == pytest.approx(2 / 3) and values["loss_per_nonpadding_target_token"] == 2
    assert values["loss_per_all_target_tokens"] == 1 and values["cross_ent_loss"] == 5
    assert values["timing/seqs_per_second"] == 1 and values["timing/target_tokens_per_second"] == 1.5
    packed = {"decoder_segment_ids": jnp.array([[1, 1, 2], [1, 0, 0]])}
    found = models.compute_base_metrics(logits, TARGETS, mask, jnp.float32(6.0), segment_ids=packed)
    assert float(found["timing/seqs"].compute()) == 3
    assert [float(x) for x in models.compute_weighted_accuracy(logits, TARGETS, mask)] == [2, 3]
    np.testing.assert_array_equal(
        models.remove_prefix(jnp.array([[1, 2, 3, 4], [5, 6, 7, 0]]), jnp.array([2, 1])), [[3, 4, 0, 0], [6, 7, 0, 0]]
    )


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_masks_and_searches():
    x = jnp.array([[1.0, 4.0, 3.0, 3.0], [0.0, -1.0, 2.0, 5.0]])
    np.testing.assert_array_equal(binary_search.topk_mask(x, 2, -9.0), [[-9, 4, 3, 3], [-9, -9, 2, 5]])
    logits = jnp.log(jnp.array([[0.1, 0.2, 0.7]]))
    np.testing.assert_array_equal(binary_search.topp_mask(logits, 0.75, -9.0)[0] > -9, [False, True, True])
    np.testing.assert_array_equal(binary_search.topp_mask(logits, 0.7, -9.0)[0] > -9, [False, False, True])
    limits = jnp.array([5, -7, 2**31 - 1])
    np.testing.assert_array_equal(binary_search.int32_bsearch((3,), lambda v: v > limits), limits)
    assert int(binary_search.int32_bsearch((), lambda v: v == v)) == -(2**31)
    floats = jnp.array([1.5, -2.25, 3e5])
    np.testing.assert_array_equal(binary_search.float32_bsearch((3,), lambda v: v > floats), floats)


def test_beam_helpers():
    x = jnp.arange(6).reshape(2, 3)
    expanded = decoding.add_beam_dim(x, 4)
    assert expanded.shape == (2, 4, 3) and decoding.flatten_beam_dim(expanded).shape == (8, 3)
    np.testing.assert_array_equal(decoding.flat_batch_beam_expand(x, 2), np.repeat(x, 2, axis=0))
    np.testing.assert_array_equal(decoding.unflatten_beam_dim(decoding.flatten_beam_dim(expanded), 2, 4), expanded)
    with pytest.raises(AssertionError):
        decoding.unflatten_beam_dim(x, 2, 4)
    stacked = jnp.stack([x, x + 10])  # a leading axis of layers
    assert decoding.flat_batch_beam_expand(stacked, 2, offset=1).shape == (2, 4, 3)
    cache = {"layer": {"cached_key": x, "cache_index": jnp.int32(3)}}
    mapped = decoding.cache_map(lambda leaf: leaf + 1, cache)
    assert int(mapped["layer"]["cache_index"]) == 3 and int(mapped["layer"]["cached_key"][0, 0]) == 1
    assert int(decoding.cache_map(lambda leaf: leaf + 1, cache, apply_to_index=True)["layer"]["cache_index"]) == 4
    beams, chosen = jnp.arange(12).reshape(2, 3, 2), jnp.array([[2, 0], [1, 1]])
    expected = np.stack([np.asarray(beams)[i][np.asarray(chosen)[i]] for i in range(2)])
    np.testing.assert_array_equal(decoding.gather_beams(beams, chosen, 2, 3, 2), expected)
    layered = decoding.cache_gather_beams({"k": jnp.stack([beams, -beams])}, chosen, 2, 3, 2, offset=1)["k"]
    np.testing.assert_array_equal(layered, [expected, -expected])
    best = decoding.gather_topk_beams(beams, jnp.array([[0.1, 0.3, 0.2], [3.0, 1.0, 2.0]]), 2, 2)
    np.testing.assert_array_equal(best, np.stack([np.asarray(beams)[0][[1, 2]], np.asarray(beams)[1][[0, 2]]]))
    np.testing.assert_allclose(decoding.brevity_penalty(0.6, 7), 2.0**0.6)
    state = decoding.beam_init(2, 3, 4, {"k": x})
    assert state.cache["k"].shape == (2, 3, 3) and state.live_seqs.shape == (2, 3, 4)
    np.testing.assert_array_equal(state.live_logprobs[0], [0, decoding.NEG_INF, decoding.NEG_INF])


def counting(state):
    """Logits that favor the token after the one being fed; the cache counts steps."""
    vocab = 8
    return 10.0 * jax.nn.one_hot((state.cur_token[:, 0] + 1) % vocab, vocab), {"n": state.cache["n"] + 1}


def test_sampling_with_callbacks_sees_t5x_states():
    seen = []

    def forbid(logits, state):
        seen.append((state.sequences.shape, state.cur_index.shape, state.cur_token.shape))
        return jnp.where(jnp.arange(8) == 3, decoding.NEG_INF, logits)

    inputs = jnp.array([[0, 5, 0, 0], [0, 0, 0, 0]])
    tokens, scores = decoding.temperature_sample(
        inputs, {"n": jnp.zeros(2)}, counting, eos_id=7, topk=1, logit_callback_fn=forbid
    )
    # The prompt 5 is forced; 6 and then EOS (7) follow, and zeros after it. Token 3 is forbidden after 2.
    assert tokens.shape == (2, 1, 4) and scores.shape == (2, 1)
    np.testing.assert_array_equal(tokens[0, 0], [5, 6, 7, 0])
    assert list(np.asarray(tokens[1, 0]))[:2] == [1, 2] and 3 not in np.asarray(tokens[1, 0])
    assert seen[0] == ((2, 5), (2,), (2, 1))
    one, score = decoding._temperature_sample_single_trial(
        inputs, {"n": jnp.zeros(2)}, counting, 7, jax.random.key(0), topk=1
    )
    np.testing.assert_array_equal(one[0], [5, 6, 7, 0])
    assert score.shape == (2,)


# --- states, optimizers, partitioners ---------------------------------------------------------------------------------


def variables():
    return {
        "params": {"dense": {"kernel": jnp.ones((4, 6)), "scale": jnp.ones(4)}},
        "params_axes": {"dense": {"kernel_axes": AxisMetadata(names=("embed", "mlp"))}},
        "counters": {"n": jnp.zeros(2)},
    }


def test_train_states():
    state = train_state.FlaxOptimTrainState.create(adafactor.Adafactor(), variables())
    assert isinstance(state, train_state.TrainState) and int(state.step) == 0
    assert state.flax_mutables.keys() == {"counters"} and state.param_states["dense"]["kernel"].m.shape == (1,)
    grads = jax.tree.map(lambda x: 0.1 * x, state.params)
    new = state.apply_gradient(grads, learning_rate=0.1, flax_mutables={"counters": {"n": jnp.ones(2)}})
    assert int(new.step) == 1 and float(new.flax_mutables["counters"]["n"][0]) == 1
    expected = adafactor.Adafactor(0.1).create(state.params).apply_gradient(grads).target
    np.testing.assert_allclose(new.params["dense"]["kernel"], expected["dense"]["kernel"])
    restored = state.restore_state(new.state_dict())
    jax.tree.map(np.testing.assert_array_equal, restored, new)
    assert new.state_dict().keys() == {"target", "state", "flax_mutables"}
    assert int(new.replace_step(jnp.int32(7)).step) == 7
    assert float(new.replace_params(jax.tree.map(jnp.zeros_like, new.params)).params["dense"]["scale"][0]) == 0
    grads_axes = {"grads": {"dense": jnp.zeros(4)}, "grads_axes": {"dense": AxisMetadata(names=("embed",))}}
    with_axes = train_state.FlaxOptimTrainState.create(adafactor.Adafactor(), variables() | grads_axes)
    assert with_axes.flax_mutables.keys() == {"counters", "grads"} and with_axes.flax_mutables_axes.keys() == {"grads"}
    assert with_axes.as_logical_axes().flax_mutables == {"grads": {"dense": partitioning.PartitionSpec("embed")}}
    axes = state.as_logical_axes()
    assert axes.params["dense"]["kernel"] == partitioning.PartitionSpec("embed", "mlp")
    assert axes.params["dense"]["scale"] is None and axes.params_axes is None
    inference = train_state.InferenceState.create(variables())
    assert inference.state_dict()["state"].keys() == {"step"}
    with pytest.raises(NotImplementedError):
        inference.apply_gradient(grads, learning_rate=0.1)


class Plain(optimizers.OptimizerDef):
    """SGD with a running sum of gradients, as an author writes it for T5X."""

    @flax.struct.dataclass
    class HyperParams:
        learning_rate: float = 0.5

    def __init__(self):
        super().__init__(self.HyperParams())

    def init_state(self, params):
        return optimizers.OptimizerState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def apply_gradient(self, hyper_params, params, state, grads):
        new = jax.tree.map(lambda p, g: p - hyper_params.learning_rate * g, params, grads)
        return new, optimizers.OptimizerState(state.step + 1, jax.tree.map(jnp.add, state.param_states, grads))


def test_an_optimizer_written_for_t5x():
    model = tiny.model(optimizer=Plain())
    layout = utils.TrainStateInitializer(
        model.optimizer_def, model.get_initial_variables, model.input_shapes({"inputs": 3, "targets": 3}),
        partitioning.PjitPartitioner(),
    )  # fmt: skip
    state = tiny.random_state(layout)
    step = lambda state: state.apply_gradient(jax.tree.map(jnp.ones_like, state.params), learning_rate=0.25)
    new = jax.jit(step)(state)
    name = lambda tree: tree["token_embedder"]["embedding"]
    np.testing.assert_allclose(name(new.params), name(state.params) - 0.25, rtol=1e-6)
    assert float(name(new.param_states)[0, 0]) == 1


def test_partitioners():
    rules = partitioning.standard_logical_axis_rules()
    partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules)
    assert isinstance(partitioner, partitioning.BasePartitioner) and partitioner.logical_axis_rules == rules
    layout = partitioner.get_data_layout(8)
    assert layout == partitioning.DataLayout(8, 0, 1, True)
    chunk = partitioner.get_local_chunk_info((8, 4), PartitionSpec("data"))
    assert chunk == partitioning.LocalChunkInfo((slice(0, 8), slice(0, 4)), 0)
    state = train_state.FlaxOptimTrainState.create(adafactor.Adafactor(), variables() | {"counters": {}})
    axes = partitioner.get_mesh_axes(state)
    assert isinstance(axes.params["dense"]["kernel"], PartitionSpec)
    moved = partitioner.move_params_to_devices(state, axes)
    double = partitioner.partition(lambda s, x: (s.step + 1, 2 * x), (axes, PartitionSpec("data")), (None, None))
    step, twice = partitioner.compile(double, moved, jnp.ones((8, 2)))(moved, jnp.ones((8, 2)))
    assert int(step) == 1 and float(twice[0, 0]) == 2
    assert not partitioning.global_mesh_defined()
    assert partitioning.default_mesh(1).axis_names == ("data", "model")


@pytest.mark.slow
def test_a_trainer_has_t5x_methods(tmp_path):
    model = tiny.model(tiny.BYTES)
    layout = utils.TrainStateInitializer(
        model.optimizer_def, model.get_initial_variables, model.input_shapes({"inputs": 9, "targets": 7}),
        partitioning.PjitPartitioner(),
    )  # fmt: skip
    made = trainer.Trainer(
        model=model, train_state=layout.from_scratch(jax.random.key(0)), partitioner=layout.partitioner,
        eval_names=["dev"], summary_dir=str(tmp_path), train_state_axes=layout.train_state_axes, rng=jax.random.key(1),
        learning_rate_fn=lambda step: 0.01, num_microbatches=None,
    )  # fmt: skip
    batch = tiny.batch()
    summary = made.train(iter([batch, batch]), 2).result()
    assert int(made.train_state.step) == 2 and summary["loss"].value == summary["loss"] > 0
    assert made.eval({"dev": [batch]})["dev"].result()["loss"] < summary["loss"]
    made.close()
    assert (tmp_path / "train").is_dir() and (tmp_path / "training_eval" / "dev").is_dir()

    # The state can be saved and restored with T5X's classes.
    checkpointer = checkpoints.Checkpointer(made.train_state, layout.partitioner, str(tmp_path), keep=1)
    checkpointer.save(made.train_state)
    assert checkpointer.all_steps() == [2] and checkpoints.latest_step(str(tmp_path)) == 2
    jax.tree.map(np.testing.assert_array_equal, checkpointer.restore(), made.train_state)
    newest = utils.RestoreCheckpointConfig(path=str(tmp_path), mode="latest")
    again = layout.from_checkpoint_or_scratch([newest], init_rng=jax.random.key(5))
    jax.tree.map(np.testing.assert_array_equal, again, made.train_state)
    loaded = checkpoints.load_t5x_checkpoint(str(tmp_path), step=2)
    np.testing.assert_array_equal(loaded["target"]["token_embedder"]["embedding"],
                                  made.train_state.params["token_embedder"]["embedding"])  # fmt: skip
    assert int(loaded["state"]["step"]) == 2
    half = checkpoints.load_t5x_checkpoint(str(tmp_path), restore_dtype=jnp.bfloat16, lazy_parameters=True)
    lazy = half["target"]["token_embedder"]["embedding"]
    assert isinstance(lazy, checkpoints.LazyArray) and lazy.get().dtype == jnp.bfloat16
    renamed = checkpoints.load_t5x_checkpoint(
        str(tmp_path), state_transformation_fns=[lambda state, _: {"renamed": state["target"]}]
    )
    assert renamed.keys() == {"renamed"}

    class Own(checkpoints.SaveBestCheckpointer):
        """Uses T5X's private names, as subclasses in users' projects do."""

        def save(self, train_state, state_transformation_fns=(), *, concurrent_gb=128):
            assert self._partitioner is layout.partitioner and self._train_state is made.train_state
            self._save_dtype = jnp.bfloat16
            super().save(train_state, state_transformation_fns, concurrent_gb=concurrent_gb)

    best = Own(
        made.train_state, layout.partitioner, str(tmp_path / "best"), keep=1, metric_name_to_monitor="train/loss"
    )
    best.save(made.train_state)
    assert best.latest_step() == 2
    assert open_checkpoint(best.checkpoints_dir).arrays["target/token_embedder/embedding"].dtype == jnp.bfloat16
    path = checkpoints.get_checkpoint_dir(str(tmp_path), 2)
    checkpoint_utils.pin_checkpoint(path)
    checkpoint_utils.remove_checkpoint_dir(path)
    assert checkpoint_utils.is_pinned_checkpoint(path) and checkpoints.get_step_from_checkpoint_dir(path)[1] == 2
    checkpoint_utils.unpin_checkpoint(path)
    checkpoint_utils.remove_checkpoint_dir(path)
    assert checkpoints.latest_step(str(tmp_path)) is None


# --- state_utils, utils -----------------------------------------------------------------------------------------------


def test_assignment_maps():
    stored = {"target": {"old": {"k": 1, "b": 2}, "same": 3, "extra": 4}}
    wanted = {"target": {"new": {"k": 0, "b": 0}, "twin": {"k": 0}, "same": 0, "fresh": 0}}
    rules = [(r"target/(?:new|twin)/(.*)", r"target/old/\1"), ("target/fresh", None)]
    found = state_utils.apply_assignment_map(stored, wanted, rules)
    assert found["target"] == {"new": {"k": 1, "b": 2}, "twin": {"k": 1}, "same": 3, "extra": 4}
    assert state_utils.apply_assignment_map(stored, wanted, rules, is_resuming=True) is stored
    with pytest.raises(ValueError, match="matches no variable"):
        state_utils.apply_assignment_map(stored, wanted, [("target/none", "target/same")])
    unused = [*rules, ("target/none", "target/same")]
    assert state_utils.apply_assignment_map(stored, wanted, unused, require_all_rules_match=False) == found
    with pytest.raises(ValueError, match="target/nothing"):
        state_utils.apply_assignment_map(stored, wanted, [("target/fresh", "target/nothing")])
    swapped = state_utils.apply_assignment_map({"a": 1, "b": 2}, {"a": 0, "b": 0}, [("a", "b"), ("b", "a")])
    assert swapped == {"a": 2, "b": 1}
    assert state_utils.intersect_state({"a": 1, "b": {"c": 2}}, {"b": {"c": 0}}) == {"b": {"c": 2}}
    assert state_utils.merge_state({"a": 1}, {"a": 5, "d": 6}) == {"a": 1, "d": 6}
    assert state_utils.merge_state({"a": 1}, {"a": 5, "d": 6}, overwrite=True) == {"a": 5, "d": 6}
    assert state_utils.get_name_tree({"a": {"b": 1}}) == {"a": {"b": "a/b"}}


def test_utils_functions():
    cfg = DatasetConfig("project_sums", {"inputs": 8, "targets": 4}, "train", 4, False, 0)
    inputs, targets = utils.get_vocabulary(cfg)
    assert inputs == targets == ByteVocabulary()
    batches = utils.get_dataset(cfg, 0, 1, models.EncoderDecoderModel.FEATURE_CONVERTER_CLS)
    zeros = utils.get_zeros_batch_like_dataset(batches)
    assert zeros["encoder_input_tokens"].shape == (4, 8) and not zeros["encoder_input_tokens"].any()
    assert next(iter(batches))["decoder_target_tokens"].shape == (4, 4)
    assert utils.round_vocab_size_to_multiple(inputs) == 384
    assert utils.import_module("tests.compat.t5x_projects.tasks") is tasks
    renamed = utils.override_params_axes_names(variables(), [("dense/kernel", ("vocab", "embed"))])
    assert renamed["params_axes"]["dense"]["kernel_axes"].names == ("vocab", "embed")
    rules = [("nothing", ("a",)), (".*/scale", ("mlp",)), ("dense/.*", ("a", "b"))]
    added = utils.override_params_axes_names(variables(), rules)
    assert added["params_axes"]["dense"]["scale_axes"].names == ("mlp",)
    for wrong in (variables(), {"params": variables()["params"]}):
        with pytest.raises(ValueError, match=r"dimensions|params_axes"):
            utils.override_params_axes_names(wrong, [("dense/kernel", ("a",))])
    assert utils.get_zeros_batch_like_dataset(batches, batch_size=7)["encoder_input_tokens"].shape == (7, 8)
    assert utils.flatten_dict_string_keys({"a": {"b": 1}}) == {"a/b": 1}
    assert utils.find_first_checkpoint_step(0, [3, 6, 9], 0, 6) == 2
    assert utils.get_first_valid_restore_config_and_paths([]) == (None, [])
    state = test_utils.make_train_state_replicated((2, 3))
    assert float(state.params["kernel"][1, 2]) == 10 and int(state.step) == 42
    assert test_utils.coords_to_idx((1, 2, 0), (3, 4, 2)) == 7 and len(test_utils.make_devices(2, 2, 1)) == 8


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", mark_slow({"tied": tiny.T5_1_0, "untied": tiny.T5_1_1}, slow=["untied"]))
@pytest.mark.slow
def test_parts_of_a_network_compute_what_the_network_does(config):
    class Parts(nn.Module):
        def setup(self):
            init = nn.initializers.normal(1.0)
            self.token_embedder = layers.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
            self.encoder = network.Encoder(config, self.token_embedder)
            self.decoder = network.Decoder(config, self.token_embedder)

        def __call__(self, inputs, decoder_inputs, targets):
            real = inputs > 0
            encoded = self.encoder(inputs, layers.make_attention_mask(real, real), deterministic=True)
            masks = layers.make_decoder_mask(targets, jnp.float32), layers.make_attention_mask(targets > 0, real)
            return self.decoder(encoded, decoder_inputs, None, *masks, deterministic=True)

    model, batch = tiny.model(config), tiny.batch()
    params = tiny.random_params(config)
    given = [batch[name] for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")]
    found = jax.jit(lambda p: Parts().apply({"params": p}, *given))(params)
    real = batch["decoder_target_tokens"] > 0
    np.testing.assert_allclose(found[real], jax.jit(model._compute_logits)(params, batch)[real], atol=2e-5)
    fresh = jax.eval_shape(lambda: Parts().init(jax.random.key(0), *given))["params"]
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
