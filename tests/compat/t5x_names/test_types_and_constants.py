"""Types, constants and base classes that projects import from T5X; and the test of every name that several use."""

import ast
import functools
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import (
    adafactor,
    checkpoints,
    decoding,
    gin_utils,
    metrics,
    models,
    optimizers,
    partitioning,
    train_state,
    utils,
)
from t5x.data import EncDecFeatureConverter
from t5x.examples.t5 import layers, network
from tests.compat.t5x_names.test_names import NAMES
from tests.support import tiny
from tests.support.paths import REPO

TESTED = [line.split("\t") for line in Path(__file__).with_name("tested.tsv").read_text().splitlines()]


def test_every_name_that_several_projects_use_has_a_test():
    """tested.tsv: module, name, file::test, whose code names it. A name used twice without a line fails."""
    used = {(name.module, name.name) for name in NAMES if name.uses >= 2}
    assert {(module, name) for module, name, _ in TESTED} == used
    functions = {}
    for _, name, test in TESTED:
        file, function = test.split("::")
        if file not in functions:
            text = (REPO / "tests" / file).read_text()
            found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            functions[file] = {node.name: ast.get_source_segment(text, node) for node in found}
        assert name in functions[file][function], f"{test} does not use {name}"


def test_types_can_annotate():
    def transform(state: models.PyTree, like: models.PyTreeDef) -> models.Array: ...

    hints = [
        models.Array, models.PyTree, models.PyTreeDef, models.MetricsMap, metrics.MetricsMap, models.DecodeFnCallable,
        checkpoints.RestoreStateTransformationFn, checkpoints.SaveStateTransformationFn, decoding.LogitCallbackFn,
        partitioning.LogicalAxisRules, optimizers.OptimizerDefType,
    ]  # fmt: skip
    for hint in hints:

        def annotated(x: hint) -> None: ...

        assert typing.get_type_hints(annotated)["x"] == hint
    assert typing.get_type_hints(transform).keys() == {"state", "like", "return"}
    assert issubclass(adafactor.Adafactor, optimizers.OptimizerDefType)
    assert isinstance(jax.tree.structure({"a": 1}), models.PyTreeDef)


@pytest.mark.slow
def test_tracers_and_temperatures():
    seen = []
    jax.jit(lambda x: seen.append(decoding._is_tracer(x)) or x)(jnp.ones(2))
    assert seen == [True] and not any(map(decoding._is_tracer, (1.0, np.ones(2), jnp.ones(2), None)))
    # At MIN_TEMPERATURE and below, decoding is greedy; above it, equal logits give either token.
    logits = jnp.array([[-1e7, -1e7, 1.0, 1.0 - 1e-6]])
    sample = functools.partial(
        decoding.temperature_sample, jnp.zeros((1, 40), jnp.int32), {}, lambda state: (logits, {}), 1, topk=0
    )
    assert set(np.ravel(sample(temperature=decoding.MIN_TEMPERATURE)[0])) == {2}
    assert set(np.ravel(sample(temperature=1.0)[0])) == {2, 3}


def test_decoding_states_have_t5x_fields():
    row, cache = jnp.zeros(2, jnp.int32), {"k": jnp.ones((2, 3))}
    state = decoding.DecodingState(cur_index=row, sequences=jnp.ones((2, 4)), cur_token=row[:, None], cache=cache)
    moved = jax.jit(lambda state: state.replace(cur_index=state.cur_index + 1))(state)
    assert int(moved.cur_index[0]) == 1 and moved.cache["k"].shape == (2, 3)
    loop = decoding.SamplingLoopState(
        jnp.int32(0), row, jnp.ones((2, 6)), cache, row[:, None], row > 0, jax.random.key(0), jnp.zeros(2)
    )
    assert loop.replace(ended=~loop.ended).ended.all() and loop.sequences.shape == (2, 6)


class Counting(models.BaseModel):
    """A model without a network: its loss is w · x."""

    FEATURE_CONVERTER_CLS = EncDecFeatureConverter

    def loss_fn(self, params, batch, dropout_rng):
        loss = jnp.sum(params["w"] * batch["x"])
        return loss, {"loss": metrics.AveragePerStep.from_model_output(loss)}

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        return {"params": {"w": jnp.ones(input_shapes["x"][1:])}}

    def predict_batch_with_aux(self, params, batch, rng=None):
        return batch["x"] * params["w"], {"scores": self.score_batch(params, batch)}

    def score_batch(self, params, batch, return_intermediates=False):
        return jnp.sum(batch["x"], axis=1)


def test_base_models():
    with pytest.raises(TypeError, match="abstract"):
        models.BaseModel(None)
    model = Counting(optimizers.sgd(0.5))
    params = model.get_initial_variables(None, {"x": (1, 3)})["params"]
    batch = {"x": jnp.arange(6.0).reshape(2, 3)}
    loss, found = model.eval_fn(params, batch)
    assert float(loss) == 15 and float(found["loss"].compute()) == 15
    np.testing.assert_array_equal(model.predict_batch(params, batch), batch["x"])
    state = train_state.FlaxOptimTrainState.create(model.optimizer_def, {"params": params})
    new = state.apply_gradient(jax.grad(lambda p: model.loss_fn(p, batch, None)[0])(params), learning_rate=None)
    np.testing.assert_allclose(new.params["w"], [1 - 0.5 * 3, 1 - 0.5 * 5, 1 - 0.5 * 7])
    with pytest.raises(TypeError, match="abstract"):
        models.BaseTransformerModel(None, tiny.PassThroughVocabulary(5), tiny.PassThroughVocabulary(5), None)


def test_infer_functions_keep_the_order_and_drop_padding():
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    params = {"w": jnp.array([1.0, 2.0, 3.0])}
    state = train_state.InferenceState(step=jnp.int32(0), params=params)
    axes = train_state.InferenceState(step=None, params={"w": partitioning.PartitionSpec()})
    model = Counting(None)
    examples = [(7 * i, {"x": np.full(3, float(i), np.float32)}) for i in range(5)]  # a batch of 4, and one row
    found = utils.get_infer_fn(model.predict_batch, 4, axes, partitioner)(examples, state, rng=jax.random.key(0))
    assert [index for index, _ in found] == [0, 7, 14, 21, 28]
    for i, (_, prediction) in enumerate(found):
        np.testing.assert_array_equal(prediction, [i, 2 * i, 3 * i])
    scores = utils.get_infer_fn(model.score_batch, 4, axes, partitioner)(examples, state)
    assert [(index, float(score)) for index, score in scores] == [(7 * i, 3.0 * i) for i in range(5)]


def test_factor_dims_by_logical_axis():
    own = {"mine": adafactor.FactorDim.ROW, "heads": adafactor.FactorDim.NONE}
    rules = adafactor.standard_logical_factor_rules(own)
    assert rules["mine"] is adafactor.FactorDim.ROW and rules["heads"] is adafactor.FactorDim.NONE
    assert rules["embed"] is adafactor.FactorDim.ROW and rules["vocab"] is adafactor.FactorDim.COLUMN
    params, axes = {"a": jnp.ones((4, 6, 8))}, {"a": ("layers", "embed", "mlp")}
    state = adafactor.Adafactor(logical_factor_rules=rules).init(params, axes)["a"]
    assert {state["v_row"].shape, state["v_col"].shape} == {(4, 6), (4, 8)} and state["v"].shape == (1,)


def test_a_decoder_layer_is_one_of_the_decoders():
    config, params = tiny.T5_1_1, tiny.random_params()["decoder"]
    x, encoded = tiny.arrays((2, 5, config.emb_dim), (2, 3, config.emb_dim))
    layer = network.DecoderLayer(config, None)  # makes the position biases of its own
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, encoded, deterministic=True))["params"]
    assert shapes.keys() - {"relpos_bias"} == params["layers_0"].keys()
    variables = {**params["layers_0"], "relpos_bias": params["relpos_bias"]}
    causal = layers.make_causal_mask(jnp.ones((2, 5)))
    apply = jax.jit(lambda params, x: layer.apply({"params": params}, x, encoded, causal, None, deterministic=True))
    found, later = apply(variables, x), apply(variables, x.at[:, 3:].set(9.0))
    np.testing.assert_allclose(found[:, :3], later[:, :3], rtol=1e-6)  # later positions are hidden
    assert np.abs(found[:, 3:] - later[:, 3:]).max() > 0.1
    # Without its kernels' outputs, only the residual stream is left.
    silent = jax.tree_util.tree_map_with_path(
        lambda path, value: 0 * value if path[-2].key in ("out", "wo") else value, variables
    )
    np.testing.assert_array_equal(apply(silent, x), x)


def test_run_passes_gin_arguments_to_a_script(monkeypatch, capsys):
    pytest.importorskip("absl.app", reason="scripts of T5X projects need absl-py")
    seen = []
    monkeypatch.setattr("sys.argv", ["script.py", "rest"])
    with pytest.raises(SystemExit) as ended:
        gin_utils.run(lambda argv: seen.append(argv))
    assert ended.value.code in (None, 0) and seen == [["script.py", "rest"]]


def test_checkpoint_managers(tmp_path):
    model = tiny.model()
    layout = utils.TrainStateInitializer(
        model.optimizer_def, model.get_initial_variables, model.input_shapes({"inputs": 3, "targets": 3}),
        partitioning.PjitPartitioner(num_partitions=1),
    )  # fmt: skip
    state = tiny.random_state(layout)
    place = {"partitioner": layout.partitioner, "model_dir": str(tmp_path)}
    saving = utils.SaveCheckpointConfig(period=5)
    make = functools.partial(utils.LegacyCheckpointManager, train_state_shape=layout.global_train_state_shape, **place)
    manager = make(save_cfg=saving)
    assert manager.should_save(5) and not manager.should_save(6)
    assert manager.save(state) and manager.all_steps(read=True) == [0] and manager.latest_step() == 0
    jax.tree.map(np.testing.assert_array_equal, manager.restore(0).params, state.params)
    assert not make().save(state) and not make().should_save(5)  # without a configuration, nothing is saved
    other = utils.create_orbax_checkpoint_manager(save_cfg=saving, train_state=layout.global_train_state_shape, **place)
    assert other.save(state.replace_step(jnp.int32(5))) and other.all_steps() == [0, 5]
    manager.delete(0)
    assert other.latest_step() == 5 and other.all_steps() == [5]
