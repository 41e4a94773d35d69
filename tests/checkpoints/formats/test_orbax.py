"""Orbax checkpoints of T5X: written by Orbax itself in all its layouts, early ones, damaged and hostile ones."""

import json
import os

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore
from t5x.checkpoints import tree as trees
from t5x.checkpoints.formats import zarr_arrays
from t5x.checkpoints.formats.native_t5x import write_native
from t5x.checkpoints.formats.orbax import read_orbax
from t5x.checkpoints.manifest import DamagedCheckpoint
from tests.checkpoints.helpers import SIDECARS, make_tree


def train_state(rows=16):
    """What T5X's train_state.state_dict() looks like, with an optax state and its empty parts."""
    tree = jax.tree.map(np.asarray, make_tree(3, rows=rows))
    del tree["target"]["unused"]  # Orbax refuses arrays without elements
    tree["state"]["param_states"]["0"] = {"count": np.asarray(3, np.int32), "none": None, "empty": {}}
    return tree


def save(path, tree, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, ocp.args.PyTreeSave(tree))
    return path


def assert_same(tree, source):
    expected = trees.flatten(tree)
    assert source.arrays.keys() == expected.keys()
    for name, array in expected.items():
        lazy, array = source.arrays[name], np.asarray(array)
        found = lazy.read()
        assert lazy.shape == found.shape == array.shape, name
        assert lazy.dtype == found.dtype == array.dtype, name
        assert found.tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"use_ocdbt": True}, "OCDBT"),
        ({"use_ocdbt": True, "use_compression": False}, "OCDBT"),
        ({"use_ocdbt": True, "use_zarr3": True}, "OCDBT"),
        ({"use_ocdbt": False}, "zarr"),
        ({"use_ocdbt": False, "use_compression": False}, "zarr"),
        ({"use_ocdbt": False, "use_zarr3": True}, "zarr"),
    ],
)
def test_every_layout_of_orbax(options, kind, tmp_path):
    tree = train_state()
    save(tmp_path / "checkpoint_3/state", tree, **options)
    for path in (tmp_path / "checkpoint_3", tmp_path / "checkpoint_3/state"):
        source = read_orbax(path)
        assert source.format == f"T5X Orbax ({kind})"
        assert source.path == str(path)
        assert source.step == 3
        assert_same(tree, source)


def test_at_the_top_with_a_dataset_beside_it(tmp_path):
    tree = train_state()
    path = save(tmp_path / "checkpoint_3", tree)
    (path / "dataset").mkdir()
    (path / "dataset/train_ds-000-of-001.index").write_bytes(b"x")
    assert_same(tree, read_orbax(path))


def test_arrays_in_several_chunks(tmp_path):
    tree = {"target": {"kernel": np.arange(96, dtype=np.float32).reshape(12, 8)}, "state": {"step": np.asarray(1)}}
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=64), tree)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "out", tree, save_args=save_args)
    database = {"driver": "ocdbt", "base": f"file://{tmp_path}/out/"}
    assert len(tensorstore.KvStore.open(database).result().list().result()) > 4
    assert_same(tree, read_orbax(tmp_path / "out"))


def test_our_own_checkpoints(tmp_path):
    tree = make_tree(3)
    del tree["target"]["unused"]
    with CheckpointStore(tmp_path) as store:
        store.save(3, tree, sidecars=SIDECARS)
    source = read_orbax(tmp_path / "checkpoint_3")
    assert source.step == 3
    assert_same(tree, source)


@pytest.mark.parametrize("wrapper", [None, "_optimizer", "optimizer"])
@pytest.mark.parametrize("codec", ["zstd", "gzip"])
def test_early_orbax(wrapper, codec, tmp_path):
    """A msgpack file of placeholders beside zarr directories, without _METADATA; small arrays may lie in the file."""
    tree = train_state()

    def store(name, array):
        if array is None or name.endswith("/m"):
            return array if array is None else msgpack.ExtType(1, msgpack.packb((array.shape, "float32", bytes(4))))
        stored = name.replace("/", ".")
        kvstore = {"driver": "file", "path": f"{tmp_path}/{stored}/"}
        metadata = {"shape": list(array.shape), "chunks": list(array.shape), "compressor": {"id": codec}}
        spec = {"driver": "zarr", "dtype": array.dtype.name, "kvstore": kvstore, "metadata": metadata}
        tensorstore.open(spec, create=True).result().write(array).result()
        return f"PLACEHOLDER://{stored}"

    def walk(name, node):
        if isinstance(node, dict):
            return {key: walk(f"{name}/{key}" if name else key, child) for key, child in node.items()}
        return store(name, node)

    content = walk("", tree if wrapper is None else {wrapper: tree})
    (tmp_path / "checkpoint").write_bytes(msgpack.packb(content))
    source = read_orbax(tmp_path)
    assert source.format == "T5X Orbax (zarr)"
    assert source.step == 3
    assert_same(tree, source)


def test_opening_reads_no_array(tmp_path):
    path = save(tmp_path / "out", train_state(), use_ocdbt=False)
    for file in path.glob("target.*/[0-9]*"):
        file.unlink()
    source = read_orbax(path)
    name = "target/encoder/layers_0/mlp/wi_0/kernel"
    assert source.arrays[name].shape == (16, 8)
    with pytest.raises(DamagedCheckpoint, match=name):
        source.arrays[name].read()


# --- What it is not


def test_other_things_are_named(tmp_path):
    with pytest.raises(UserError, match="no checkpoint directory"):
        read_orbax(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not an Orbax checkpoint of T5X"):
        read_orbax(tmp_path)
    write_native(tmp_path / "native", 1, [("target/a", np.zeros(3, np.float32))])
    with pytest.raises(UserError, match="native T5X checkpoint"):
        read_orbax(tmp_path / "native")
    save(tmp_path / "params", {"params": {"a": jnp.ones(3)}})
    with pytest.raises(UserError, match="not of a T5X training state: it has the array params/a"):
        read_orbax(tmp_path / "params")
    save(tmp_path / "text", {"target": {"a": jnp.ones(3), "note": "hello"}})
    with pytest.raises(UserError, match="is a string"):
        read_orbax(tmp_path / "text")
    unfinished = tmp_path / "checkpoint_1.orbax-checkpoint-tmp-17"
    unfinished.mkdir()
    with pytest.raises(UserError, match="never finished"):
        read_orbax(unfinished)


# --- Damage and malice


@pytest.mark.parametrize("options", [{}, {"use_compression": False}, {"use_zarr3": True}])
def test_a_missing_or_cut_off_file_of_the_database_is_found(options, tmp_path):
    """Those that no array needs (of a process, superseded by the merged ones) may go; no array comes back changed."""
    tree = train_state(rows=200)
    path = save(tmp_path / "out", tree, use_ocdbt=True, **options)
    files = [file for file in path.rglob("*") if file.is_file()]
    found = 0
    for file in files:
        good = file.read_bytes()
        for length in (None, 0, len(good) // 2, len(good) - 1):
            if length is None:
                file.unlink()
            else:
                file.write_bytes(good[: max(length, 0)])
            try:
                assert_same(tree, read_orbax(path))
            except UserError:
                found += 1
            file.write_bytes(good)
    assert found >= 4
    assert_same(tree, read_orbax(path))


def test_a_missing_chunk_is_found_in_zarr3(tmp_path):
    path = save(tmp_path / "out", train_state(), use_ocdbt=False, use_zarr3=True)
    name = "target/encoder/layers_0/mlp/wi_0/kernel"
    (path / name.replace("/", ".") / "c/0/0").unlink()
    with pytest.raises(DamagedCheckpoint, match=name):
        read_orbax(path).arrays[name].read()


def test_links_are_refused(tmp_path):
    path = save(tmp_path / "out", train_state(), use_ocdbt=True)
    secret = tmp_path / "secret"
    data = next(path.glob("ocdbt.process_0/d/*"))
    data.rename(secret)
    data.symlink_to(secret)
    with pytest.raises(DamagedCheckpoint, match="not a regular file"):
        read_orbax(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/state").symlink_to(path)
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        read_orbax(tmp_path / "other")


@pytest.mark.parametrize("name", ["../secret", "/etc/secret", "a/../../secret", ".."])
def test_placeholders_out_of_the_checkpoint(name, tmp_path):
    (tmp_path / "in").mkdir()
    zarr_arrays.write_array(tmp_path, "secret", np.ones(3, np.float32))
    (tmp_path / "in/checkpoint").write_bytes(msgpack.packb({"target": {"a": f"PLACEHOLDER://{name}"}}))
    with pytest.raises(DamagedCheckpoint, match="not a path inside it"):
        read_orbax(tmp_path / "in")


def entry(*keys, kind="np.ndarray"):
    metadata = {"value_type": kind, "skip_deserialize": False}
    return {"key_metadata": [{"key": key, "key_type": 2} for key in keys], "value_metadata": metadata}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"{}", "no tree_metadata"),
        ({"x": 3}, "does not describe x"),
        ({"x": {"key_metadata": [{}], "value_metadata": {}}}, "does not describe x"),
        ({"x": entry()}, "not names"),
        ({"x": entry("target", "")}, "not names"),
        ({"x": entry("target", "../../secret")}, "not names"),
        ({"x": entry("..")}, "not a path inside it"),
        ({"x": entry("target", "a\n")}, "not a path inside it"),
        ({"x": entry("target", "a")}, "target/a"),
    ],
)
def test_hostile_metadata(content, message, tmp_path):
    if isinstance(content, dict):
        content = json.dumps({"tree_metadata": content, "use_ocdbt": False}).encode()
    (tmp_path / "_METADATA").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=message):
        read_orbax(tmp_path)


def test_a_database_without_its_manifest(tmp_path):
    path = save(tmp_path / "out", train_state(), use_ocdbt=True)
    os.remove(path / "manifest.ocdbt")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.ocdbt is missing"):
        read_orbax(path)


def test_an_array_larger_than_its_files_can_be(tmp_path):
    path = save(tmp_path / "out", train_state(), use_ocdbt=False, use_zarr3=True)
    file = path / "target.encoder.encoder_norm.scale/zarr.json"
    content = json.loads(file.read_text())
    content["shape"] = [2**45]
    file.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match="its files cannot hold"):
        read_orbax(path)
