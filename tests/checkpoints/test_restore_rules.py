"""T5X's rules of restoring: assignment_map, strict, fallback_to_scratch, state_transformation_fns."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, tree
from t5x.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.checkpoints.formats import LazyArray, Source
from t5x.checkpoints.formats.own_checkpoint import read_own_checkpoint
from t5x.checkpoints.model_description import sidecars
from t5x.checkpoints.transfer import AssignmentMap
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from t5x.trainer.restore import RunState, restore_or_init, restore_params, restore_state
from tests.support import tiny

UNROLLED = dataclasses.replace(tiny.T5_1_1, num_encoder_layers=2, num_decoder_layers=1)
SCANNED = dataclasses.replace(UNROLLED, scan_layers=True)


@functools.cache
def layout_of(config=UNROLLED) -> StateLayout:
    model = tiny.model(config)
    return StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))


@functools.cache
def checkpoint() -> dict[str, np.ndarray]:
    """A state with unrolled layers by name, every array a different one; slots that are not in use have one number."""
    shapes = tree.flatten(layout_of().abstract.state_dict())
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=leaf.shape).astype(leaf.dtype) for name, leaf in shapes.items()}


def source_of(arrays, step: int | None = 7) -> Source:
    def lazy(value):
        return LazyArray(value.shape, value.dtype, lambda: value)

    return Source("a test", "/the/checkpoint", step, {n: lazy(a) for n, a in arrays.items() if n != "state/step"})


def restored(arrays, config=UNROLLED, **rules):
    """The state that training would start with, as {name: array}."""
    layout = layout_of(config)
    cfg = RestoreCheckpointConfig(path="/the/checkpoint", **rules)
    state = restore_state(source_of(arrays), cfg, layout.model, layout, jax.random.key(3))
    return {name: np.asarray(leaf) for name, leaf in tree.flatten(state.state_dict()).items()}


@functools.cache
def initial(config=UNROLLED) -> dict[str, np.ndarray]:
    fresh = layout_of(config).init(jax.random.key(3))
    return {name: np.asarray(leaf) for name, leaf in tree.flatten(fresh.state_dict()).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# --- assignment_map


def test_the_first_pattern_that_matches_the_whole_name_decides():
    rules = AssignmentMap([("target/a", "target/x"), ("target/a.*", None), (r"target/(b)", r"target/old_\1")])
    names = ["target/a", "target/ab", "target/b", "target/bc"]
    assert rules.sources(names) == {"target/a": "target/x", "target/ab": None, "target/b": "target/old_b"}


def test_a_pattern_without_the_root_means_the_parameter_and_its_optimizer_state():
    rules = AssignmentMap([("new/(.*)", r"old/\1")])
    names = ["target/new/kernel", "state/param_states/new/kernel/v_row", "state/step"]
    assert rules.sources(names) == {
        "target/new/kernel": "target/old/kernel",
        "state/param_states/new/kernel/v_row": "state/param_states/old/kernel/v_row",
    }


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("target/encodr/.*", None)], "'target/encodr/.*'"),
        ([("target/.*", None), ("target/a", "target/b")], "'target/a'"),
        ([("a(", None)], "not a regular expression"),
        ([("target/a", r"target/\2")], "the replacement"),
        (["target/a"], "must be a pair"),
        ([("target/a", 3)], "must be a pair"),
    ],
)
def test_a_mistake_in_the_map_is_named(pairs, message):
    with pytest.raises(UserError, match=re.escape(message)):
        AssignmentMap(pairs).sources(["target/a"])


@pytest.mark.parametrize("config", [UNROLLED, SCANNED], ids=["unrolled", "scanned"])
def test_renamed_modules_are_found(config):
    old = {name.replace("encoder/layers_", "encoder/block_"): a for name, a in checkpoint().items()}
    found = restored(old, config, assignment_map=[(r"encoder/layers_(\d)/(.*)", r"encoder/block_\1/\2")])
    expected = checkpoint()
    assert found["state/step"] == 7
    if config is UNROLLED:
        assert_equal(found, expected | {"state/step": np.int32(7)})
    for layer in range(2) if config is SCANNED else ():
        kernel = found["target/encoder/encoder/mlp/wo/kernel"][:, layer]
        np.testing.assert_array_equal(kernel, expected[f"target/encoder/layers_{layer}/mlp/wo/kernel"])


@pytest.mark.slow
def test_none_leaves_one_layer_of_a_stack_at_its_initial_value():
    found = restored(checkpoint(), SCANNED, assignment_map=[(r"target/encoder/layers_1/.*", None)])
    name = "target/encoder/{}/mlp/wo/kernel"
    kernel = found[name.format("encoder")]
    np.testing.assert_array_equal(kernel[:, 0], checkpoint()[name.format("layers_0")])
    np.testing.assert_array_equal(kernel[:, 1], initial(SCANNED)[name.format("encoder")][:, 1])


@pytest.mark.slow
def test_parameter_of_another_shape_is_an_error_unless_excluded():
    name = "target/decoder/logits_dense/kernel"
    other = checkpoint() | {name: np.zeros((12, 99), np.float32)}
    with pytest.raises(UserError, match=r"shape +target/decoder/logits_dense/kernel +\[12, 31\] +\[12, 99\]"):
        restored(other, strict=False, fallback_to_scratch=True)
    found = restored(other, assignment_map=[(name, None)], optimizer_state="reset")
    np.testing.assert_array_equal(found[name], initial()[name])
    np.testing.assert_array_equal(
        found["target/token_embedder/embedding"], checkpoint()["target/token_embedder/embedding"]
    )


def test_without_state_the_optimizer_and_the_step_are_reset(caplog):
    with caplog.at_level(logging.INFO):
        found = restored(checkpoint(), assignment_map=[("state.*", None)])
    expected = {n: checkpoint()[n] if n.startswith("target/") else a for n, a in initial().items()}
    assert_equal(found, expected)
    assert "step: 0; optimizer state: reset" in caplog.text


# --- strict and fallback_to_scratch


def test_missing_or_unexpected_arrays_raise_an_error_with_the_fix():
    scale = "target/encoder/encoder_norm/scale"
    less = {name: a for name, a in checkpoint().items() if name != scale}
    with pytest.raises(UserError, match=rf"missing +{scale} +\[12\][^!]*fallback_to_scratch=True"):
        restored(less, strict=False)
    more = checkpoint() | {"target/adapter/kernel": np.ones((2, 3), np.float32)}
    with pytest.raises(UserError, match=r"unexpected +target/adapter/kernel[^!]*strict=False"):
        restored(more, fallback_to_scratch=True)


def test_strict_false_skips_what_the_model_lacks(caplog):
    more = checkpoint() | {"target/adapter/kernel": np.ones((2, 3), np.float32)}
    with caplog.at_level(logging.INFO):
        assert_equal(restored(more, strict=False), checkpoint() | {"state/step": np.int32(7)})
    assert "(strict=False):\n  target/adapter/kernel" in caplog.text


@pytest.mark.parametrize("config", [UNROLLED, SCANNED], ids=["unrolled", "scanned"])
def test_fallback_initializes_only_missing_arrays(config, caplog):
    """The checkpoint has one layer less than the network: that starts from scratch, its optimizer state as well."""
    less = {name: a for name, a in checkpoint().items() if "encoder/layers_1" not in name}
    with caplog.at_level(logging.INFO):
        found = restored(less, config, fallback_to_scratch=True)
    if config is SCANNED:
        name = "target/encoder/{}/attention/query/kernel"
        kernel = found[name.format("encoder")]
        np.testing.assert_array_equal(kernel[:, 0], less[name.format("layers_0")])
        np.testing.assert_array_equal(kernel[:, 1], initial(SCANNED)[name.format("encoder")][:, 1])
    else:
        assert_equal(found, initial() | less | {"state/step": np.int32(7)})
        assert "optimizer state: kept" in caplog.text
    assert "9 are not in the checkpoint" in caplog.text
    assert "target/encoder/layers_1/attention/key/kernel [12, 15]" in caplog.text


# --- state_transformation_fns


def test_functions_get_the_mapped_state_in_order():
    calls = []

    def double(state, target, *, is_resuming=False):
        calls.append(("double", is_resuming, target["target"]["encoder"]["encoder_norm"]["scale"].shape))
        assert "final_norm" not in state["target"]["encoder"] and int(state["state"]["step"]) == 7
        state["target"]["encoder"]["encoder_norm"]["scale"] = 2 * np.asarray(
            state["target"]["encoder"]["encoder_norm"]["scale"]
        )
        return state

    def add_one(state, target, *, is_resuming=False):
        calls.append("add_one")
        state["target"]["encoder"]["encoder_norm"]["scale"] += 1
        state["state"]["step"] = 11
        return state

    old = {name.replace("encoder_norm", "final_norm"): a for name, a in checkpoint().items()}
    found = restored(
        old, assignment_map=[("encoder/encoder_norm/scale", "encoder/final_norm/scale")],
        state_transformation_fns=[double, add_one],
    )  # fmt: skip
    assert calls == [("double", False, (12,)), "add_one"]
    name = "target/encoder/encoder_norm/scale"
    assert_equal(found, checkpoint() | {name: 2 * checkpoint()[name] + 1, "state/step": np.int32(11)})


def test_a_function_that_returns_no_state_is_named():
    with pytest.raises(UserError, match="returned a NoneType"):
        restored(checkpoint(), state_transformation_fns=[lambda state, target, is_resuming: None])


def test_functions_of_saving_change_values_but_no_names():
    state = {"target": {"a": jnp.ones(3), "b": jnp.ones(2)}, "state": {"step": jnp.int32(4)}}

    def halve(state, infos):
        assert infos["target"]["a"].shape == (3,)
        return {**state, "target": jax.tree.map(lambda x: x / 2, state["target"])}, infos

    cfg = SaveCheckpointConfig(state_transformation_fns=[halve, halve], dtype="bfloat16")
    found = cfg.tree_to_save(state)
    assert found["target"]["a"].dtype == jnp.bfloat16 and found["state"]["step"] == 4
    np.testing.assert_array_equal(found["target"]["a"], np.full(3, 0.25))
    drop = SaveCheckpointConfig(state_transformation_fns=[lambda state, infos: ({"target": {}}, infos)])
    with pytest.raises(UserError, match=r"state_transformation_fns [^!]*missing +target/a"):
        drop.tree_to_save(state)


def test_resuming_applies_no_map_but_tells_the_functions(tmp_path):
    layout, seen = layout_of(), []
    state = tiny.random_state(layout)
    with CheckpointStore(tmp_path) as store:
        run = RunState(0, {"position": 5})
        store.save(2, state.state_dict(), sidecars=sidecars(layout.model, None) | run.sidecars())
    cfg = RestoreCheckpointConfig(
        path="/nowhere", assignment_map=[("no such name", None)],
        state_transformation_fns=[lambda state, target, is_resuming: seen.append(is_resuming) or state],
    )  # fmt: skip
    resumed, run = restore_or_init(store, cfg, layout.model, layout, jax.random.key(1))
    assert seen == [True] and run == RunState(0, {"position": 5})
    assert_equal(tree.flatten(jax.device_get(resumed.params)), tree.flatten(jax.device_get(state.params)))


# --- Parameters alone, and the position in the data


def test_inference_takes_parameters_by_the_same_rules(tmp_path):
    """Rules about optimizer state are no mistake where none is restored."""
    layout = layout_of()
    cfg = RestoreCheckpointConfig(
        path="",
        dtype="bfloat16",
        assignment_map=[("state/param_states/.*", None), ("target/encoder/encoder_norm/.*", None)],
    )
    params = restore_params(source_of(checkpoint()), layout.model, layout, cfg, rng=3)
    found = tree.flatten(params)
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(found["encoder/encoder_norm/scale"], np.ones(12))
    expected = checkpoint()["target/token_embedder/embedding"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["token_embedder/embedding"], expected)
    with CheckpointStore(tmp_path) as store:
        store.save(2, {"target": params}, sidecars=sidecars(layout.model, None))
    again = restore_params(read_own_checkpoint(store.path(2)), layout.model, layout, RestoreCheckpointConfig(path=""))
    assert again["token_embedder"]["embedding"].dtype == jnp.float32
    np.testing.assert_array_equal(again["token_embedder"]["embedding"], expected.astype(np.float32))


def test_the_position_in_the_data_is_restored_on_request(tmp_path):
    layout = layout_of()
    with CheckpointStore(tmp_path / "first") as store:
        files = sidecars(layout.model, None) | RunState(0, {"position": 5}).sidecars()
        store.save(2, tiny.random_state(layout).state_dict(), sidecars=files)
    cfg = RestoreCheckpointConfig(path=str(tmp_path / "first"))
    for restore_dataset, expected in ((True, {"position": 5}), (False, None)):
        cfg = dataclasses.replace(cfg, restore_dataset=restore_dataset)
        state, run = restore_or_init(
            CheckpointStore(tmp_path / "second"), cfg, layout.model, layout, jax.random.key(1)
        )  # fmt: skip
        assert (int(state.step), run) == (2, RunState(2, expected))


def test_ignored_options_are_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            RestoreCheckpointConfig(path="x", use_gda=True, checkpointer_cls=object)
    assert caplog.text.count("RestoreCheckpointConfig.use_gda") == 1
    with pytest.raises(UserError, match="dtype is 'float33'"):
        RestoreCheckpointConfig(path="x", dtype="float33")
