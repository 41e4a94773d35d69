"""Mesh TensorFlow checkpoints: a real index, checkpoints that TensorFlow writes, and every rule for names."""

import json
import logging
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import DamagedCheckpoint
from t5x.checkpoints.formats.mesh_tensorflow import read_mesh_tensorflow, translate
from t5x.checkpoints.formats.tensor_bundle import read_bundle, read_index
from tests.checkpoints.formats.bundle_writer import write_bundle
from tests.support.paths import SHARED
from tests.support.programs import run_reference

PROGRAM = Path(__file__).parents[1] / "programs/save_with_tensorflow.py"
STEP = 1000000


@pytest.fixture(scope="module")
def real_directory():
    directory = SHARED / "t5x_testdata/mtf_tiny_t5"
    if not directory.is_dir():
        pytest.skip("the index of a real checkpoint (../shared/data/t5x_testdata) is not here")
    return directory


@pytest.fixture(scope="module")
def real_index(real_directory):
    return read_index(real_directory / "model.ckpt-0.index")


@pytest.fixture(scope="module")
def written(real_index, tmp_path_factory):
    """(directory, values) of checkpoints that TensorFlow wrote, with all variables of the real index."""
    directory = tmp_path_factory.mktemp("tensorflow")
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=entry.shape).astype(entry.dtype) for name, entry in real_index.entries.items()}
    values["global_step"] = np.int64(STEP)
    names = sorted(values)
    piece = "decoder/rms_norm/scale"
    job = {
        "variables": {name: [value.shape, value.dtype.name] for name, value in values.items()},
        "checkpoints": {
            f"model.ckpt-{STEP}": [names],
            "three/model.ckpt-5": [names[:40], names[40:70], names[70:]],
            "sliced/model.ckpt-5": [[name for name in names if name != piece] + [[piece, "64 32,32"]]],
        },
    }
    raw = {name: np.frombuffer(value.tobytes(), np.uint8) for name, value in values.items()}
    np.savez(directory / "values.npz", **raw)
    (directory / "job.json").write_text(json.dumps(job))
    result = run_reference(PROGRAM, directory)
    assert result.returncode == 0, result.stderr
    return directory, values


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the first of them, to be damaged."""
    for file in written[0].glob(f"model.ckpt-{STEP}.*"):
        shutil.copy(file, tmp_path)
    return tmp_path / f"model.ckpt-{STEP}"


def test_the_real_index(real_index, real_directory):
    listed = {}
    for line in (real_directory / "model-info.txt").read_text().splitlines():
        if line.startswith("Variable "):
            name, shape = line.split()[1], line.split("Shape[")[1].split("]")[0]
            listed[name] = tuple(int(dimension.split("=")[1]) for dimension in shape.split(", "))
    parameters = {name: entry for name, entry in real_index.entries.items() if "_slot_" not in name}
    del parameters["global_step"]
    assert len(real_index.entries) == 105
    assert len(parameters) == 52
    assert {name: listed[name] for name in parameters} == {name: entry.shape for name, entry in parameters.items()}
    assert {entry.dtype for entry in parameters.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert max(entry.offset + entry.size for entry in real_index.entries.values()) == 13_077_504
    assert all(translate(name) for name in real_index.entries if name != "global_step")


def test_the_checksums_of_the_real_index(real_directory, tmp_path):
    """global_step is known to be 0; whatever the weights were, they were not all zero."""
    shutil.copy(real_directory / "model.ckpt-0.index", tmp_path)
    (tmp_path / "model.ckpt-0.data-00000-of-00002").write_bytes(bytes(8))
    with open(tmp_path / "model.ckpt-0.data-00001-of-00002", "wb") as file:
        file.truncate(13_077_504)
    source = read_mesh_tensorflow(tmp_path)
    assert source.step == 0
    with pytest.raises(DamagedCheckpoint, match=r"checksum of shared/embedding does not match"):
        source.arrays["target/token_embedder/embedding"].read()


@pytest.mark.parametrize("prefix", [f"model.ckpt-{STEP}", "three/model.ckpt-5"])
def test_a_checkpoint_that_tensorflow_writes_loads_exactly(written, prefix):
    directory, values = written
    source = read_mesh_tensorflow(directory / prefix)
    assert source.format == "Mesh TensorFlow"
    assert source.step == STEP
    rest = dict(source.arrays)
    step = rest.pop("state/step").read()
    assert (step, step.dtype, step.shape) == (STEP, np.int32, ())
    for variable, value in values.items():
        if variable != "global_step":
            name = translate(variable).replace("/layers_0/relpos_bias", "/relpos_bias")
            array = rest.pop(name)
            assert (array.shape, array.dtype) == (value.shape, value.dtype)
            found = array.read()
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
    slots = [name.rsplit("/", 1)[1] for name in rest]
    assert {slot: slots.count(slot) for slot in slots} == {"m": 52, "v_row": 52, "v_col": 52}
    for array in rest.values():
        found = array.read()
        assert (array.shape, array.dtype, found.dtype, found.tolist()) == ((1,), np.float32, np.float32, [0.0])


def test_names_and_places(written):
    directory, values = written
    arrays = read_mesh_tensorflow(directory / f"model.ckpt-{STEP}").arrays
    for name, variable in {
        "target/token_embedder/embedding": "shared/embedding",
        "target/decoder/logits_dense/kernel": "decoder/logits/kernel",
        "target/encoder/relpos_bias/rel_embedding": "encoder/block_000/layer_000/SelfAttention/relative_attention_bias",
        "state/param_states/decoder/relpos_bias/rel_embedding/v": (
            "decoder/block_000/layer_000/SelfAttention/relative_attention_bias_slot_v"
        ),
        "target/encoder/layers_1/mlp/wi_1/kernel": "encoder/block_001/layer_001/DenseReluDense/wi_1/kernel",
        "target/decoder/layers_0/encoder_decoder_attention/out/kernel": "decoder/block_000/layer_001/EncDecAttention/o",
        "target/decoder/decoder_norm/scale": "decoder/rms_norm/scale",
    }.items():
        np.testing.assert_array_equal(arrays[name].read(), values[variable])


def test_every_flipped_bit_of_the_data_is_found(copy):
    data_file = copy.with_name(copy.name + ".data-00000-of-00001")
    entries = read_index(f"{copy}.index").entries
    arrays = read_bundle(copy)
    rng = np.random.default_rng(1)
    with open(data_file, "r+b") as file:
        for place in rng.integers(0, data_file.stat().st_size, 100).tolist():
            (name,) = (name for name, e in entries.items() if e.offset <= place < e.offset + e.size)
            file.seek(place)
            (octet,) = file.read(1)
            for value, whole in [(octet ^ 1 << rng.integers(8).item(), False), (octet, True)]:
                file.seek(place)
                file.write(bytes([value]))
                file.flush()
                if whole:
                    arrays[name].read()
                else:
                    with pytest.raises(DamagedCheckpoint, match=f"checksum of {name} does not match"):
                        arrays[name].read()


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_index_never_gives_anything_else(copy, real_directory, damage):
    """Neither that which TensorFlow wrote here nor the real one, which is compressed."""
    rng = np.random.default_rng(2)
    refused = 0
    for source in (f"{copy}.index", real_directory / "model.ckpt-0.index"):
        content = Path(source).read_bytes()
        expected = read_index(source)
        path = copy.with_name("damaged.index")
        for place in rng.integers(0, len(content), 60).tolist():
            damaged = bytearray(content[:place] if damage == "cut" else content)
            if damage == "flip":
                damaged[place] ^= 1 << rng.integers(8).item()
            path.write_bytes(damaged)
            try:
                assert read_index(path) == expected  # the padding of the footer means nothing
                assert damage == "flip"
                assert place >= len(content) - 48
            except UserError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused > 100


def test_a_partitioned_variable_is_refused(written):
    with pytest.raises(UserError, match=r"'decoder/rms_norm/scale' is stored in slices"):
        read_mesh_tensorflow(written[0] / "sliced/model.ckpt-5")


@pytest.mark.parametrize(
    "variable, name",
    [
        ("shared/embedding_slot_vr", "state/param_states/token_embedder/embedding/v_row"),
        ("shared/embedding_slot_vc", "state/param_states/token_embedder/embedding/v_col"),
        ("encoder/embedding", "target/encoder/token_embedder/embedding"),
        ("transformer/embedding_slot_v", "state/param_states/decoder/token_embedder/embedding/v"),
        ("encoder/block_011/layer_000/SelfAttention/k", "target/encoder/layers_11/attention/key/kernel"),
        ("encoder/block_000/layer_000/SelfAttention/v_slot_v",
         "state/param_states/encoder/layers_0/attention/value/kernel/v"),
        ("decoder/block_002/layer_000/SelfAttention/q", "target/decoder/layers_2/self_attention/query/kernel"),
        ("transformer/block_002/layer_000/SelfAttention/o", "target/decoder/layers_2/self_attention/out/kernel"),
        ("decoder/block_120/layer_001/EncDecAttention/v",
         "target/decoder/layers_120/encoder_decoder_attention/value/kernel"),
        ("encoder/block_000/layer_001/DenseReluDense/wi/kernel", "target/encoder/layers_0/mlp/wi/kernel"),
        ("transformer/block_000/layer_001/DenseReluDense/wi_0/kernel", "target/decoder/layers_0/mlp/wi_0/kernel"),
        ("decoder/block_000/layer_002/DenseReluDense/wo/kernel", "target/decoder/layers_0/mlp/wo/kernel"),
        ("encoder/block_000/layer_000/layer_norm/scale", "target/encoder/layers_0/pre_attention_layer_norm/scale"),
        ("encoder/block_000/layer_001/rms_norm/scale", "target/encoder/layers_0/pre_mlp_layer_norm/scale"),
        ("decoder/block_000/layer_000/layer_norm/scale", "target/decoder/layers_0/pre_self_attention_layer_norm/scale"),
        ("decoder/block_000/layer_001/rms_norm/scale", "target/decoder/layers_0/pre_cross_attention_layer_norm/scale"),
        ("decoder/block_000/layer_002/layer_norm/scale", "target/decoder/layers_0/pre_mlp_layer_norm/scale"),
        ("transformer/block_000/layer_000/rms_norm/scale",
         "target/decoder/layers_0/pre_self_attention_layer_norm/scale"),
        ("transformer/block_000/layer_001/layer_norm/scale", "target/decoder/layers_0/pre_mlp_layer_norm/scale"),
        ("encoder/final_layer_norm/scale", "target/encoder/encoder_norm/scale"),
        ("transformer/rms_norm/scale", "target/decoder/decoder_norm/scale"),
        ("transformer/logits/kernel", "target/decoder/logits_dense/kernel"),
        ("encoder/block_000/layer_002/rms_norm/scale", None),
        ("encoder/block_000/layer_001/EncDecAttention/q", None),
        ("encoder/logits/kernel", None),
        ("shared/embedding_slot_m", None),
        ("x/shared/embedding", None),
        ("shared/embedding\n", None),
        ("shared/embedding/Adam", None),
    ],
)  # fmt: skip
def test_name_map(variable, name):
    assert translate(variable) == name


def bias(tower, block):
    return f"{tower}/block_{block:03d}/layer_000/SelfAttention/relative_attention_bias"


def test_a_bias_in_every_layer_keeps_its_layer(tmp_path):
    ones = np.ones((2, 32), np.float32)
    names = [bias("encoder", 0), bias("encoder", 1), bias("transformer", 0)]
    write_bundle(tmp_path / "model.ckpt-1", {name + slot: ones for name in names for slot in ("", "_slot_v")})
    source = read_mesh_tensorflow(tmp_path)
    assert source.step is None
    assert {name for name in source.arrays if name.startswith("target")} == {
        "target/encoder/layers_0/relpos_bias/rel_embedding",
        "target/encoder/layers_1/relpos_bias/rel_embedding",
        "target/decoder/relpos_bias/rel_embedding",
    }
    assert "state/param_states/decoder/relpos_bias/rel_embedding/m" in source.arrays
    assert "state/param_states/encoder/layers_0/relpos_bias/rel_embedding/v_col" in source.arrays


def test_factored_slots(tmp_path):
    row, column = np.arange(3, dtype=np.float32), np.arange(4, dtype=np.float32)
    variables = {
        "shared/embedding": np.ones((3, 4), np.float32),
        "shared/embedding_slot_vr": row,
        "shared/embedding_slot_vc": column,
        "encoder/rms_norm/scale": np.ones(4, np.float32),
    }
    write_bundle(tmp_path / "model.ckpt-1", variables)
    arrays = read_mesh_tensorflow(tmp_path).arrays
    states = {name: array.read().tolist() for name, array in arrays.items() if name.startswith("state")}
    prefix = "state/param_states/token_embedder/embedding/"
    assert states == {
        prefix + "m": [0], prefix + "v": [0], prefix + "v_row": row.tolist(), prefix + "v_col": column.tolist(),
    }  # fmt: skip


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"shared/embedding": ONE, "encoder/adapter/kernel": ONE}, "'encoder/adapter/kernel'"),
        ({"encoder/rms_norm/scale": ONE, "encoder/final_layer_norm/scale": ONE}, "both become target/encoder/encoder_"),
        ({"decoder/embedding": ONE, "transformer/embedding": ONE}, "both become"),
        ({"shared/embedding_slot_vr": ONE}, "has the slots v_row;"),
        ({"shared/embedding_slot_v": ONE, "shared/embedding_slot_vc": ONE}, "has the slots v, v_col;"),
        ({"global_step": np.ones(2, np.int64)}, r"global_step is int64 \[2\]"),
        ({"global_step": np.float32(1)}, r"global_step is float32 \[\]"),
        ({"global_step": np.int64(-1)}, "step is -1"),
        ({"global_step": np.int64(2**31)}, "step is 2147483648"),
    ],
)
def test_other_models_are_refused(tmp_path, variables, message):
    write_bundle(tmp_path / "model.ckpt-1", variables)
    with pytest.raises(UserError, match=message):
        read_mesh_tensorflow(tmp_path)


@pytest.fixture
def several(tmp_path):
    for step in (900, 1000, 20):
        write_bundle(tmp_path / f"model.ckpt-{step}", {"global_step": np.int64(step)})
    return tmp_path


def test_paths(several, caplog):
    caplog.set_level(logging.INFO)
    assert read_mesh_tensorflow(several / "model.ckpt-20").step == 20
    assert read_mesh_tensorflow(str(several / "model.ckpt-20.index")).step == 20
    assert not caplog.messages
    assert read_mesh_tensorflow(several).step == 1000
    assert "using model.ckpt-1000, the newest of 3" in caplog.text
    (several / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-900"\n')
    source = read_mesh_tensorflow(several)
    assert (source.step, source.path) == (900, str(several / "model.ckpt-900"))
    assert "using model.ckpt-900, which the file checkpoint names" in caplog.text


@pytest.mark.parametrize(
    "content, message",
    [
        ('model_checkpoint_path: "model.ckpt-7"', r"names model.ckpt-7, but .*found: model.ckpt-1000"),
        ('model_checkpoint_path: "../model.ckpt-900"', "names '../model"),
        ('model_checkpoint_path: "/model.ckpt-900"', "names '/model"),
        ('model_checkpoint_path: ".."', "checkpoint names '"),
        ('model_checkpoint_path: "\\056./x"', "checkpoint names '"),
        ("model_checkpoint_path", "checkpoint names '"),
        ("\x82\xa7version\x03", "TensorFlow state file"),
    ],
)
def test_state_files_that_lead_elsewhere(several, content, message):
    (several / "checkpoint").write_text(content)
    write_bundle(several.parent / "model.ckpt-900", {"global_step": np.int64(666)})
    with pytest.raises(UserError, match=message):
        read_mesh_tensorflow(several)


def test_paths_that_are_not_checkpoints(several):
    with pytest.raises(UserError, match=r"model\.ckpt-7\.index"):
        read_mesh_tensorflow(several / "model.ckpt-7")
    (several / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \*.index file"):
        read_mesh_tensorflow(several / "empty")
    for name in ("best", "last"):
        write_bundle(several / "unclear" / name, {"global_step": np.int64(1)})
    with pytest.raises(UserError, match=r"several checkpoints \(best, last\)"):
        read_mesh_tensorflow(several / "unclear")
