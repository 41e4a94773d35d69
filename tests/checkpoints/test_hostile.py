"""Hostile checkpoints and model directories, each kind by itself; tests/fuzz has a few hundred random ones."""

import json
import os
import shutil
import signal
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts

import t5x
from t5x._runtime.errors import UserError
from t5x.checkpoints import array_reader, layout, manifest, ocdbt, paths
from t5x.checkpoints.formats import LazyArray, open_checkpoint
from t5x.checkpoints.formats.safety import check_expansion
from t5x.checkpoints.model_description import check_same_model
from t5x.trainer.restore import RunState
from tests.checkpoints.formats.bundle_writer import varint
from tests.fuzz.file_mutations import repair
from tests.fuzz.originals import FORMATS, STEP, write_originals
from tests.fuzz.worker import Opened
from tests.support import tiny
from tests.support.commands import run

OURS = f"checkpoint_{STEP}"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("originals")
    write_originals(directory)
    return directory


@pytest.fixture
def copy(originals, tmp_path):
    def copy(format: str) -> Path:
        return Path(shutil.copytree(originals / format, tmp_path / "copy"))

    return copy


@pytest.fixture(autouse=True)
def no_hang():
    """Ends a test that waits for a pipe, or counts to a billion."""

    def end(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read(path: Path, vocabulary: str | None = None) -> None:
    """Reads a checkpoint and rebuilds its model, as `t5x infer --model` does."""
    for array in open_checkpoint(path).arrays.values():
        np.asarray(array)
    model = t5x.load(str(path), vocabulary=vocabulary)
    assert model.input_ids("a quick brown fox")[0] and model.target_ids("a quick brown fox")[0]


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- What is not a regular file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, name",
    [
        ("t5x", f"{OURS}/vocabulary/inputs/sentencepiece.model"),
        ("native", "checkpoint"),
        ("native", "target.token_embedder.embedding/0.0"),
        ("Orbax OCDBT", "manifest.ocdbt"),
        ("early Orbax", "checkpoint"),
        ("Mesh TensorFlow", f"model.ckpt-{STEP}.index"),
        ("Mesh TensorFlow", f"model.ckpt-{STEP}.data-00000-of-00001"),
        ("Hugging Face", "config.json"),
        ("Hugging Face", "model.safetensors"),
        ("Hugging Face", "spiece.model"),
        ("Hugging Face", "tokenizer_config.json"),
        ("Hugging Face", "t5x_checksums.json"),
        ("Hugging Face, tokenizer.json", "tokenizer.json"),
        ("Hugging Face, tokenizer.json", "model.safetensors.index.json"),
    ],
)
def test_a_pipe_in_the_place_of_a_file(copy, format, name):
    path = copy(format)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(UserError):
        read(path, FORMATS[format])


@pytest.mark.parametrize("format, name", [("native", "checkpoint"), ("Hugging Face", "config.json")])
def test_an_endless_device_in_the_place_of_a_file(copy, format, name):
    path = copy(format)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError):
        read(path, FORMATS[format])


def test_a_pipe_in_the_place_of_a_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "checkpoint")
    for path in (tmp_path, tmp_path / "checkpoint"):
        with pytest.raises(UserError, match="not a regular file"):
            open_checkpoint(path)


# --- Links that lead out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["inputs/sentencepiece.model", "targets/tokenizer.json"])
def test_a_vocabulary_that_the_manifest_does_not_list_is_not_read(copy, tmp_path, name):
    path = copy("t5x") / OURS
    file = path / "vocabulary" / name
    file.rename(tmp_path / "secret")
    repair(path)
    manifest.verify(path)
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=f"lacks '{file.name}'"):
        t5x.load(str(path))
    with pytest.raises(UserError, match=f"{file.name} cannot be read"):  # as a gin file names it
        t5x.data.load_vocabulary(file.parent)


def test_a_shard_that_is_a_link(copy, tmp_path):
    path = copy("Hugging Face, tokenizer.json")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = min(index.values())
    (path / shard).rename(tmp_path / "secret")
    (path / "weights").symlink_to(tmp_path / "secret")
    edit(path / "model.safetensors.index.json", weight_map={t: s.replace(shard, "weights") for t, s in index.items()})
    with pytest.raises(UserError, match="names the file 'weights'"):
        open_checkpoint(path)


def test_a_state_file_of_tensorflow_that_is_a_link(copy, tmp_path):
    path = copy("Mesh TensorFlow")
    (path / "checkpoint").rename(tmp_path / "secret")
    (path / "checkpoint").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="checkpoint cannot be read"):
        open_checkpoint(path)


def test_a_checkpoint_of_a_model_dir_that_is_a_link(copy, tmp_path):
    """One that the user names may lead anywhere; one of a directory that came from elsewhere may not."""
    path = copy("t5x")
    (path / OURS).rename(tmp_path / "secret")
    (path / OURS).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="symbolic link that leads out"):
        open_checkpoint(path)
    assert open_checkpoint(path / OURS).step == STEP
    (path / OURS).unlink()
    (tmp_path / "secret").rename(path / "elsewhere")
    (path / OURS).symlink_to("elsewhere")
    assert open_checkpoint(path).step == STEP


# --- More than the files hold -----------------------------------------------------------------------------------------


def claim(file: Path) -> None:
    """Turns an array into one of 16 GiB that is all fill value."""
    content = json.loads(file.read_text()) | {"shape": [2**28, 16], "fill_value": 0}
    if "chunks" in content:
        content["chunks"] = [2**20, 16]
    else:
        content["chunk_grid"]["configuration"]["chunk_shape"] = [2**20, 16]
        content["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    file.write_text(json.dumps(content))
    for chunk in [path for path in file.parent.iterdir() if path != file]:
        shutil.rmtree(chunk) if chunk.is_dir() else chunk.unlink()


@pytest.mark.parametrize("format", ["native", "Orbax zarr", "Orbax zarr3", "early Orbax"])
def test_arrays_of_fill_values(copy, format):
    path = copy(format)
    embedding = path / "target.token_embedder.embedding"
    claim(embedding / ("zarr.json" if format == "Orbax zarr3" else ".zarray"))
    if format == "native":
        import msgpack

        content = msgpack.unpackb((path / "checkpoint").read_bytes(), ext_hook=msgpack.ExtType)
        content["optimizer"]["target"]["token_embedder"]["embedding"]["metadata"]["shape"] = [2**28, 16]
        (path / "checkpoint").write_bytes(msgpack.packb(content))
        (path / "checkpoint.sha256").unlink()
    with pytest.raises(UserError, match=r"claims arrays of .* its files of"):
        read(path, "bytes")


@pytest.mark.parametrize("format", ["Orbax OCDBT", "t5x"])
def test_arrays_of_fill_values_in_a_database(copy, format):
    path = copy(format)
    state = path / OURS / "state" if format == "t5x" else path
    database = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}).result()
    key = "target.token_embedder.embedding/.zarray"
    content = json.loads(database[key]) | {"shape": [2**28, 16], "chunks": [2**20, 16], "fill_value": 0}
    database[key] = json.dumps(content).encode()
    repair(path)
    with pytest.raises(UserError, match="claims arrays"):
        read(path, "bytes")
    if format == "t5x":
        with pytest.raises(UserError, match="claims arrays"):
            array_reader.restore(path / OURS)


def test_chunks_that_are_fill_value_may_be_missing(copy):
    """As TensorStore writes them unless it is told otherwise."""
    path = copy("Orbax zarr")
    edit(path / "target.encoder.encoder_norm.scale/.zarray", fill_value=2.5)
    (path / "target.encoder.encoder_norm.scale/0").unlink()
    with pytest.raises(UserError, match="encoder_norm/scale"):  # Orbax states that it stored all of them
        open_checkpoint(path).arrays["target/encoder/encoder_norm/scale"].read()
    edit(path / "_METADATA", store_array_data_equal_to_fill_value=False)
    array = open_checkpoint(path).arrays["target/encoder/encoder_norm/scale"].read()
    np.testing.assert_array_equal(array, np.full(8, 2.5, np.float32))


def test_how_much_larger_arrays_may_be_than_their_files():
    """Float32 arrays of bfloat16 values with an Adam of zeros compress to a sixth; small ones may be all zeros."""
    kernel = LazyArray((2**28,), np.dtype(np.float32), lambda: None)
    check_expansion("x", [kernel], 2**30 // 6)
    check_expansion("x", [LazyArray((2**24,), np.dtype(np.float32), lambda: None)], 1000)
    with pytest.raises(UserError, match="claims arrays"):
        check_expansion("x", [kernel], 10**8)


def test_a_chunk_larger_than_its_array(copy):
    path = copy("native")
    file = path / "target.encoder.encoder_norm.scale/.zarray"
    edit(file, chunks=[2**32])
    with pytest.raises(UserError, match=r"encoder_norm/scale: chunks .*4294967296"):
        open_checkpoint(path)


@pytest.mark.parametrize("format", ["Orbax zarr", "Orbax zarr3"])
def test_millions_of_chunks_of_fill_value(copy, format):
    """They take no room, but TensorStore would look for each of them."""
    path = copy(format)
    if format == "Orbax zarr":
        file, changes = ".zarray", {"chunks": [1]}
    else:
        file, changes = "zarr.json", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}}}
    file = path / "target.encoder.encoder_norm.scale" / file
    claim(file)
    edit(file, shape=[10**7], **changes)
    with pytest.raises(UserError, match=r"encoder_norm/scale: .* chunks"):
        open_checkpoint(path)


def test_metadata_with_a_hole_of_a_terabyte(copy):
    """TensorStore ends the process if it cannot allocate what it wants to read."""
    path = copy("Orbax zarr3")
    os.truncate(path / "target.token_embedder.embedding/zarr.json", 2**40)
    with pytest.raises(UserError, match="too many for metadata"):
        open_checkpoint(path)


def test_an_array_without_elements_that_has_some(copy):
    path = copy("t5x") / OURS
    file = path / "state/_METADATA"
    claimed = {"target/x": {"shape": [2**40], "dtype": "float32"}}
    edit(file, custom_metadata={"empty_arrays": claimed})
    repair(path)
    with pytest.raises(UserError, match="without elements"):
        open_checkpoint(path)
    with pytest.raises(UserError, match="without elements"):
        array_reader.read_shapes(path)


def test_directories_that_are_not_checkpoints_are_not_opened(tmp_path):
    """They may be links to anywhere, or unreadable."""
    for name in ("checkpoint_3", "checkpoint_5", "target.encoder.scale", "lost+found"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_3/file").touch()
    with Opened(tmp_path) as opened:
        assert paths.list_steps(tmp_path) == [3]
    assert {"checkpoint_3", "checkpoint_5"} <= set(opened.names())
    assert not {"target.encoder.scale", "lost+found"} & set(opened.names())


def test_millions_of_layers_in_a_stack():
    huge = LazyArray((1, 10**7, 1), np.dtype(np.float32), lambda: None)
    with pytest.raises(UserError, match="at most 1000"):
        layout.canonical({"target/encoder/encoder/mlp/wi/kernel": huge})


def test_nodes_of_a_database_that_share_a_child(tmp_path):
    """They could be a cycle, or a tree that is small on disk and endless to walk."""
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/"}}
    config = {"compression": None, "max_decoded_node_bytes": 200, "max_inline_value_bytes": 10}
    database = ts.KvStore.open({**spec, "config": config}).result()
    with ts.Transaction(atomic=True) as transaction:
        for i in range(8):
            database.with_transaction(transaction)[f"key{i}"] = b"x" * 50
    assert len(ocdbt.locate(tmp_path)) == 8
    base = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    children = [e["location"] for e in ts.ocdbt.dump(base, root).result()["entries"]]
    places = [tuple(map(int, location.split(":")[-2:])) for location in children]
    file, at, size = tmp_path / root.split(":")[2], *map(int, root.split(":")[-2:])
    content = bytearray(file.read_bytes())
    node = bytes(content[at : at + size])
    (first, length), (second, other) = places[:2]
    for old, new in ((second, first), (other, length)):
        node = node.replace(varint(old), varint(new), 1) if old != new else node
    content[at : at + size] = node[:-4] + struct.pack("<I", google_crc32c.value(node[:-4]))
    file.write_bytes(content)
    with pytest.raises(ValueError, match="two nodes with the child"):
        ocdbt.locate(tmp_path)


# --- What a checkpoint says of its model ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_encoder_layers": 10**7}, "num_encoder_layers: 10000000 is stated, the arrays have 2"),
        ({"num_layers": 10**7}, "num_layers"),
        ({"emb_dim": 10**18}, "emb_dim"),
        ({"vocab_size": "384"}, "vocab_size"),
        ({"num_heads": True}, "num_heads"),
        ({"mlp_activations": ["relu"] * 10**5}, "mlp_activations"),
        ({"mlp_activations": 3}, "mlp_activations"),
        ({"param_scan_axis": 7}, "param_scan_axis"),
        ({"logits_via_embedding": True}, "logits_via_embedding"),
        ({"dropout_rate": "x"}, "dropout_rate"),
        ({"mlp_activations": ["gelu", {}]}, "mlp_activations"),
        ({"scan_layers": "no"}, "scan_layers"),
        ({"remat_policy": 3}, "remat_policy"),
    ],
)
@pytest.mark.parametrize("vocabulary", [None, "bytes"])
def test_a_configuration_of_another_model(copy, changes, named, vocabulary):
    path = copy("t5x") / OURS
    file = path / "model.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"config": content["config"] | changes}))
    repair(path)
    if vocabulary and "scan_layers" in changes:
        return  # it is rebuilt unrolled then
    with pytest.raises(UserError, match=named):
        t5x.load(str(path), vocabulary=vocabulary)


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"network": None}, "no field 'network'"),
        ({"network": 3}, "'network' is '3' instead of a str"),
        ({"model": []}, "'model' is"),
        ({"config": [1]}, "'config' is"),
        ({"config": None}, "no field 'config'"),
        ({"template": "x"}, "'template' is"),
        ({"inputs_bidirectional_attention": "no"}, "'inputs_bidirectional_attention' is"),
        (b"[]", "not a JSON object"),
        (b"{", "model.json"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "nested"),
    ],
)
def test_a_model_json_that_describes_no_model(copy, capsys, content, reason):
    path = copy("t5x") / OURS
    file = path / "model.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content).encode()
    file.write_bytes(content)
    repair(path)
    run(capsys, "inspect", path).refused(str(path), reason)
    with pytest.raises(UserError, match=reason):
        t5x.load(str(path))
    if "template" not in str(content):
        with pytest.raises(UserError, match=reason):
            check_same_model(path, tiny.model(), same_classes=True)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"extra_ids": 10**9}, "extra_ids is '1000000000'"),
        ({"extra_ids": []}, "extra_ids"),
        ({"class": ["x"]}, "class"),
        ({"sentencepiece_model_file": "/etc/passwd"}, "multiple values"),
        ({"normalizer_spec_overrides": {"name": []}}, "normalizer_spec_overrides"),
        ({"x": 1}, "unexpected keyword"),
    ],
)
def test_a_vocabulary_json_that_asks_for_too_much(copy, changes, reason):
    path = copy("t5x") / OURS
    edit(path / "vocabulary/inputs/vocabulary.json", **changes)
    repair(path)
    with pytest.raises(UserError, match=reason):
        t5x.load(str(path))


@pytest.mark.parametrize(
    "format, name",
    [
        ("t5x", f"{OURS}/MANIFEST.json"),
        ("t5x", f"{OURS}/state/_METADATA"),
        ("t5x", f"{OURS}/vocabulary/inputs/vocabulary.json"),
        ("t5x", f"{OURS}/vocabulary/targets/tokenizer.json"),
        ("native", "target.token_embedder.embedding/.zarray"),
        ("Hugging Face", "config.json"),
        ("Hugging Face", "tokenizer_config.json"),
        ("Hugging Face", "t5x_checksums.json"),
        ("Hugging Face, tokenizer.json", "tokenizer.json"),
        ("Hugging Face, tokenizer.json", "model.safetensors.index.json"),
    ],
)
def test_json_nested_too_deep(copy, format, name):
    """Python parses the first one and cannot print it; it cannot parse the second."""
    path = copy(format)
    for depth in (500, 100_000):
        (path / name).write_bytes(b'{"a":' * depth + b"1" + b"}" * depth)
        if format == "t5x" and "MANIFEST" not in name:
            repair(path)
        with pytest.raises(UserError):
            read(path, FORMATS[format])


@pytest.mark.parametrize("name", ["run.json", "dataset/train-000-of-001.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"3", b'{"metrics": 3, "first_step": "x"}', b"{}"])
def test_the_position_of_a_run(copy, name, content):
    path = copy("t5x") / OURS
    files = RunState(0, {}).sidecars()
    for file, sound in files.items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_bytes(content if file == name else sound)
    repair(path)
    if name != "run.json" and content[:1] == b"{":
        return  # any object may be a position
    with pytest.raises(UserError, match=name):
        RunState.of(path)
