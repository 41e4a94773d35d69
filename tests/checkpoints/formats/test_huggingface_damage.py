"""Damaged and hostile Hugging Face directories are refused with a message; a destination is whole or not there."""

import json
import os
import re
import struct

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats.huggingface import read_huggingface, safetensors_files, write_huggingface
from t5x.checkpoints.formats.source import LazyArray
from tests.checkpoints.formats import huggingface_models as models


@pytest.fixture
def directory(tmp_path):
    return models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config())


def refused(directory, pattern):
    with pytest.raises(UserError, match=pattern) as error:
        read_huggingface(directory)
    assert str(directory) in str(error.value) or "config.json" in str(error.value)


def test_the_undamaged_one_is_read(directory):
    source = read_huggingface(directory)
    assert len(source.arrays) == len(models.tiny_tensors())
    wanted = models.tiny_tensors()["decoder.block.0.layer.0.SelfAttention.o.weight"].T
    np.testing.assert_array_equal(source.arrays["target/decoder/layers_0/self_attention/out/kernel"].read(), wanted)


def header(entries):
    return json.dumps(entries).encode()


def f32(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 16,
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}" + b"trailing",
        struct.pack("<Q", 40_000) + b"[" * 40_000,
    ],
)
def test_files_that_are_not_safetensors(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    refused(directory, r"model\.safetensors")


def test_a_header_that_is_too_large(directory):
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 2**26))
        file.truncate(2**27)
    refused(directory, r"model\.safetensors .*67,108,864")


@pytest.mark.parametrize(
    "entries",
    [
        {"a": f32([2], 0, 8), "b": f32([2], 4, 12)},
        {"a": f32([2], 0, 8), "b": f32([2], 12, 20)},
        {"a": f32([2], 0, 8), "b": f32([100], 8, 408)},
        {"a": f32([3], 0, 8)},
        {"a": f32([2], 8, 0)},
        {"a": f32([-2], -8, 0)},
        {"a": f32([2.0], 0, 8)},
        {"a": f32([10**18] * 8, 0, 8)},
        {"a": f32([10**4000], 0, 8)},
        {"a": f32([1] * 100, 0, 4), "b": f32([4], 4, 20)},
        {"a": f32([2**62, 2**62, 0], 0, 0), "b": f32([5], 0, 20)},
        {"a": f32([2], 0, 8, dtype="X7")},
        {"a": f32([2], 0, 8, dtype=["F32"])},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"a": [1, 2]},
        {"a": None},
    ],
)
def test_headers_that_lie(directory, entries):
    models.write_safetensors(directory / "model.safetensors", {"x": np.zeros(5)}, header=header(entries))
    refused(directory, r"model\.safetensors is damaged")


def test_a_name_that_occurs_twice(directory):
    entry = json.dumps(f32([5], 0, 20))
    text = f'{{"x": {entry}, "x": {entry}}}'.encode()
    models.write_safetensors(directory / "model.safetensors", {"x": np.zeros(5)}, header=text)
    refused(directory, "twice")


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(at=st.integers(0, 3000), value=st.integers(0, 255), cut=st.one_of(st.none(), st.integers(0, 5000)))
def test_no_damage_to_a_file_gives_anything_but_a_message(tmp_path_factory, at, value, cut):
    directory = models.write_directory(
        tmp_path_factory.mktemp("fuzz") / "hf", models.tiny_tensors(), models.tiny_config()
    )
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[at % len(content)] = value
    (directory / "model.safetensors").write_bytes(content[:cut])
    try:
        source = read_huggingface(directory)
    except UserError:
        return
    for array in source.arrays.values():
        assert array.read().shape == array.shape


def test_a_file_that_shrinks_after_it_was_opened(directory):
    source = read_huggingface(directory)
    os.truncate(directory / "model.safetensors", 5000)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        for array in source.arrays.values():
            array.read()


def sharded(directory):
    """Spreads the tensors of a directory over two files."""
    (directory / "model.safetensors").unlink()
    tensors = models.tiny_tensors()
    parts = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    placed = {}
    for i, part in enumerate(parts):
        models.write_safetensors(directory / f"part{i}.safetensors", part)
        placed |= {name: f"part{i}.safetensors" for name in part}
    return placed


def write_index(directory, placed):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def test_shards_missing_mixed_up_and_elsewhere(directory):
    placed = sharded(directory)
    write_index(directory, placed)
    assert len(read_huggingface(directory).arrays) == len(models.tiny_tensors())

    models.write_safetensors(directory.parent / "outside.safetensors", {"shared.weight": np.zeros((10, 4))})
    for elsewhere in (
        "../outside.safetensors",
        str(directory.parent / "outside.safetensors"),
        "..",
        "",
        "a\0b",
        "a\\b",
    ):
        write_index(directory, placed | {"shared.weight": elsewhere})
        refused(directory, re.escape(repr(elsewhere)))

    write_index(directory, placed | {"shared.weight": "part1.safetensors"})
    refused(directory, r"part\d\.safetensors and .* shared\.weight")
    for damaged in ([], {"shared.weight": 3}, None):
        write_index(directory, damaged)
        refused(directory, "weight_map")
    write_index(directory, placed)
    (directory / "part1.safetensors").unlink()
    refused(directory, "part1.safetensors")


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({"d_ff": 7}, r"DenseReluDense.wi.weight +\[7, 4\] +\[6, 4\]"),
        ({"vocab_size": 11}, r"shared.weight +\[11, 4\] +\[10, 4\]"),
        ({"num_layers": 2}, r"missing +encoder\.block\.1"),
        ({"num_layers": 10**12}, "config.json states more layers"),
        ({"num_layers": "1"}, "num_layers is '1'"),
        ({"num_heads": True}, "num_heads is True"),
        ({"d_model": 0}, "d_model is 0"),
        ({"d_kv": None}, "d_kv is None"),
        ({"dropout_rate": 1.5}, "dropout_rate"),
        ({"model_type": "bart"}, "model_type"),
        ({"model_type": []}, "model_type"),
        ({"feed_forward_proj": "gated-gelu"}, "wi_0.weight"),
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj"),
        ({"feed_forward_proj": "a-b-c"}, "feed_forward_proj"),
        ({"dense_act_fn": []}, "feed_forward_proj"),
        ({"relative_attention_num_buckets": 64}, "do not match its config.json"),
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05, not 1e-06"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
    ],
)
def test_a_config_of_another_model(directory, changes, pattern):
    (directory / "config.json").write_text(json.dumps(models.tiny_config(**changes)))
    refused(directory, pattern)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_damaged_config_json_is_refused(directory, content):
    (directory / "config.json").write_text(content)
    refused(directory, "config.json is damaged")


@pytest.mark.parametrize("path", ["nothing://x", "/no/such/directory"])
def test_paths_that_cannot_be_opened(path):
    with pytest.raises(UserError, match=path):
        read_huggingface(path)


@pytest.mark.parametrize("missing, pattern", [("config.json", "config.json"), ("model.safetensors", "neither")])
def test_a_missing_file(directory, missing, pattern):
    (directory / missing).unlink()
    refused(directory, pattern)


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({"shared.weight": None}, "no tensor shared.weight"),
        ({"decoder.final_layer_norm.weight": None}, r"missing +decoder\.final_layer_norm\.weight"),
        ({"adapter.weight": np.zeros(3)}, r"unexpected +adapter\.weight"),
        ({"decoder.embed_tokens.weight": np.ones((10, 4))}, "decoder.embed_tokens.weight differs"),
        ({"lm_head.weight": np.ones((10, 4))}, '"tie_word_embeddings": false'),
    ],
)
def test_tensors_that_do_not_fit(directory, changes, pattern):
    tensors = {n: v for n, v in (models.tiny_tensors() | changes).items() if v is not None}
    models.write_safetensors(directory / "model.safetensors", tensors)
    refused(directory, pattern)


def test_an_encoder_alone_is_named_so(directory):
    tensors = {n: v for n, v in models.tiny_tensors().items() if not n.startswith("decoder")}
    models.write_safetensors(directory / "model.safetensors", tensors)
    refused(directory, "encoder alone")


def test_quantised_tensors_are_named_so(directory):
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    for entry in entries.values():
        entry["dtype"] = "I32"
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    refused(directory, "I32.*quantised")


def test_a_vocabulary_larger_than_the_embedding(directory):
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    refused(directory, "384 ids")


@pytest.mark.parametrize("occupant", ["directory", "file", "dangling link"])
def test_an_existing_destination_is_left_alone(directory, occupant):
    source = read_huggingface(directory)
    destination = directory.parent / "new"
    if occupant == "directory":
        destination.mkdir()
    elif occupant == "file":
        destination.write_text("mine")
    else:
        destination.symlink_to(directory.parent / "nowhere")
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(UserError, match="exists already"):
        write_huggingface(destination, source.config, source.arrays)
    assert sorted(directory.parent.rglob("*")) == before


def test_a_failure_leaves_nothing_behind(directory):
    source = read_huggingface(directory)

    def fail():
        raise UserError("the source is gone")

    last = list(source.arrays)[-1]
    arrays = dict(source.arrays) | {last: LazyArray(source.arrays[last].shape, source.arrays[last].dtype, fail)}
    with pytest.raises(UserError, match="the source is gone"):
        write_huggingface(directory.parent / "new", source.config, arrays)
    assert list(directory.parent.iterdir()) == [directory]


@pytest.mark.parametrize(
    "config, arrays, pattern",
    [
        ({}, {"target/encoder/encoder_norm/scale": None}, r"missing +target/encoder/encoder_norm/scale"),
        ({}, {"target/adapter/kernel": (2, 2)}, r"unexpected +target/adapter/kernel"),
        ({}, {"target/encoder/encoder_norm/scale": (5,)}, r"encoder_norm/scale +\[4\] +\[5\]"),
        ({"logits_via_embedding": False}, {}, r"missing +target/decoder/logits_dense/kernel"),
        ({"mlp_activations": ("relu", "gelu")}, {}, "mlp_activations"),
    ],
)
def test_unsupported_checkpoints_are_not_written(directory, config, arrays, pattern):
    source = read_huggingface(directory)
    changed = {
        n: s and LazyArray(s, np.dtype(np.float32), lambda s=s: np.zeros(s, np.float32)) for n, s in arrays.items()
    }
    arrays = {n: a for n, a in (dict(source.arrays) | changed).items() if a is not None}
    with pytest.raises(UserError, match=pattern):
        write_huggingface(directory.parent / "new", dict(source.config) | config, arrays)
    assert list(directory.parent.iterdir()) == [directory]


def test_a_configuration_without_sizes_and_a_remote_destination(directory):
    source = read_huggingface(directory)
    config = {key: value for key, value in source.config.items() if key != "emb_dim"}
    with pytest.raises(UserError, match="lacks emb_dim"):
        write_huggingface(directory.parent / "new", config, source.arrays)
    with pytest.raises(UserError, match="remote"):
        write_huggingface("gs://bucket/new", source.config, source.arrays)


@pytest.mark.parametrize("shape", [(0, 3), (1,), (5, 3), (3000, 2000)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_the_container_keeps_values_of_every_type(tmp_path, shape, dtype):
    numpy_dtype = next(known for known in safetensors_files.DTYPES.values() if known.name == dtype)
    value = np.random.default_rng(0).standard_normal(shape[::-1]).astype(numpy_dtype).T
    arrays = {"a": value, "b": np.ones(1, numpy_dtype)}
    lazy = {name: LazyArray(array.shape, array.dtype, array.view) for name, array in arrays.items()}
    safetensors_files.write(tmp_path / "x.safetensors", lazy)
    tensors = safetensors_files.read_header(str(tmp_path / "x.safetensors"))
    assert tensors["a"].dtype == numpy_dtype and tensors["a"].read().tobytes() == value.tobytes()
    assert tensors["a"].same_content(tensors["a"]) and not tensors["a"].same_content(tensors["b"])


def test_the_library_reads_the_container(tmp_path):
    from safetensors.numpy import load_file

    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    safetensors_files.write(tmp_path / "x.safetensors", {"a": LazyArray((4, 3), value.dtype, lambda: value.T)})
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["a"], value.T)
