import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from t5x import checkpoints
from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, DamagedCheckpoint, array_reader, restore
from t5x.checkpoints.formats import open_checkpoint

from .helpers import SIDECARS, abstract, assert_same, make_tree, start_program

ONE_DEVICE = SingleDeviceSharding(jax.devices()[0])
IO = Path("/proc/self/io")


@pytest.fixture
def checkpoint(tmp_path):
    with CheckpointStore(tmp_path / "run") as store:
        store.save(3, make_tree(3), sidecars=SIDECARS)
    return store.path(3)


def damage(checkpoint):
    (checkpoint / "state" / "_METADATA").write_bytes(b"{}")


def test_everything_comes_back_bit_for_bit(checkpoint):
    tree = make_tree(3)
    on_host = restore(checkpoint)
    assert_same(tree, on_host)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host))
    on_device = restore(checkpoint, abstract(tree, ONE_DEVICE))
    assert_same(tree, on_device)
    assert all(leaf.sharding == ONE_DEVICE for leaf in jax.tree.leaves(on_device))


def test_any_sharding_restores_onto_any_other(tmp_path):
    process = start_program("reshard.py", tmp_path, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output == "same bits\n"
    assert_same(make_tree(3), restore(tmp_path / "checkpoint_3", abstract(make_tree(3), ONE_DEVICE)))


@pytest.mark.parametrize("keep", [("target",), ("state/step",), ("target", "state/step")])
def test_sections_absent_from_the_tree_are_not_restored(checkpoint, keep):
    tree = make_tree(3)
    wanted = {"target": tree["target"]} if "target" in keep else {}
    if "state/step" in keep:
        wanted["state"] = {"step": tree["state"]["step"]}
    assert_same(wanted, restore(checkpoint, abstract(wanted, ONE_DEVICE)))


@pytest.mark.skipif(not IO.exists(), reason="the system does not say how much was read")
def test_a_partial_restore_does_not_read_the_optimizer(tmp_path):
    tree = {"target": {"w": jnp.ones((64, 64))}, "state": {"param_states": {"v": jnp.ones((1024, 1024))}}}
    with CheckpointStore(tmp_path) as store:
        store.save(1, tree, sidecars={})

    def bytes_read(wanted):
        def count():
            return int(re.search(r"rchar: (\d+)", IO.read_text())[1])

        before = count()
        assert_same(wanted, restore(store.path(1), abstract(wanted), verify=False))
        return count() - before

    assert bytes_read(tree) > 4 * 1024 * 1024
    assert bytes_read({"target": tree["target"]}) < 128 * 1024


def test_dtypes_are_cast_as_requested_and_logged(checkpoint, caplog):
    tree = make_tree(3)
    wanted = {"target": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree["target"])}
    for sharding in (None, ONE_DEVICE):
        caplog.clear()
        with caplog.at_level(logging.INFO, "t5x"):
            assert_same(wanted, restore(checkpoint, abstract(wanted, sharding)))
        assert "float32 arrays to bfloat16" in caplog.text


def test_a_tree_that_does_not_fit_is_refused_with_a_table(checkpoint):
    wanted = abstract(make_tree(3))
    layer = wanted["target"]["encoder"]["layers_0"]["mlp"]
    layer["wi_1"] = layer.pop("wi_0")
    wanted["target"]["token_embedder"]["embedding"] = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16)
    with pytest.raises(UserError, match=r"1 missing, 1 unexpected, 1 of another shape") as error:
        restore(checkpoint, wanted)
    text = re.sub(" +", " ", str(error.value))
    assert str(checkpoint) in text
    assert "missing target/encoder/layers_0/mlp/wi_1/kernel [16, 8] -" in text
    assert "unexpected target/encoder/layers_0/mlp/wi_0/kernel - [16, 8]" in text
    assert "shape target/token_embedder/embedding [64, 8] [32, 8]" in text


def test_shapes_can_be_read_without_the_data(checkpoint):
    assert checkpoints.read_shapes(checkpoint) == abstract(make_tree(3))


def test_a_damaged_checkpoint_is_not_restored(checkpoint):
    damage(checkpoint)
    with pytest.raises(DamagedCheckpoint, match="state/_METADATA"):
        restore(checkpoint)
    with pytest.raises(DamagedCheckpoint, match="metadata cannot be read"):
        restore(checkpoint, verify=False)


def test_missing_array_data_is_an_error_even_unverified(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"target": {"w": jnp.ones((64, 64))}}, sidecars={})
    for path in (store.path(1) / "state" / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DamagedCheckpoint):
        restore(store.path(1), verify=False)


def test_a_checkpoint_or_the_newest_whole_one_of_a_model_dir_is_opened(tmp_path, caplog):
    model_dir = tmp_path / "run"
    with CheckpointStore(model_dir) as store:
        for step in (3, 12):
            store.save(step, make_tree(step), sidecars={})
    checkpoint = store.path(3)
    assert open_checkpoint(checkpoint).path == str(checkpoint)
    with caplog.at_level(logging.INFO, "t5x"):
        assert open_checkpoint(str(model_dir)).path == str(store.path(12))
        assert "checkpoint_12" in caplog.text
        damage(store.path(12))
        assert open_checkpoint(model_dir).path == str(checkpoint)
    renamed = checkpoint.rename(tmp_path / "best")
    assert open_checkpoint(renamed).path == str(renamed)
    assert_same(make_tree(3), restore(renamed))


def test_a_model_dir_without_a_whole_checkpoint_is_an_error_that_names_the_damage(checkpoint):
    damage(checkpoint)
    with pytest.raises(UserError, match="checkpoint_3: state/_METADATA"):
        open_checkpoint(checkpoint.parent)


def test_the_state_directory_is_plain_orbax(checkpoint):
    """Other tools can read the arrays: OCDBT, one item, T5X's tree."""
    import orbax.checkpoint as ocp

    assert (checkpoint / "state" / "manifest.ocdbt").exists()
    tree = make_tree(3)
    del tree["target"]["unused"]  # Orbax cannot store arrays without elements
    with ocp.PyTreeCheckpointer() as checkpointer:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        assert_same(tree, checkpointer.restore(checkpoint / "state", restore_args=as_numpy))
        assert_same(tree, checkpointer.restore(checkpoint / "state"))
    assert array_reader.StoredArrays(checkpoint / "state").shapes.keys() >= {"target/unused/table", "state/step"}
