"""`t5x inspect`: what a checkpoint is, in text and as JSON, and a hash that follows the numbers alone."""

import dataclasses
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from t5x.checkpoints import layout
from t5x.checkpoints.convert import convert
from t5x.checkpoints.formats import LazyArray, open_checkpoint
from t5x.checkpoints.formats.native_t5x import write_native
from t5x.cli.inspect_verb import canonical_params, params_sha256
from tests.checkpoints.test_convert import training_state, write_ours
from tests.support.commands import run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """One training state of an umT5 with layers of both kinds, in every format that we write."""
    directory = tmp_path_factory.mktemp("checkpoints")
    changes = {"per_layer_relative_position_bias": True}
    made = {"t5x": write_ours(directory / "checkpoint_7", training_state(**changes), **changes)}
    for to, layers in [("t5x", "scanned"), ("native", "unrolled"), ("native", "scanned"), ("hf", "unrolled")]:
        made[f"{to} {layers}"] = directory / f"{to}-{layers}"
        convert(str(made["t5x"]), str(made[f"{to} {layers}"]), to=to, layers=layers)
    return made


FORMATS = {
    "t5x": "t5x",
    "t5x scanned": "t5x",
    "native unrolled": "native T5X (version 3)",
    "native scanned": "native T5X (version 3)",
    "hf unrolled": "Hugging Face (umt5, safetensors)",
}


@pytest.mark.parametrize("name", FORMATS)
def test_text(checkpoints, capsys, name):
    result = run(capsys, "inspect", checkpoints[name])
    assert result.code == 0
    head, table = result.out.split("\n\n")
    step, state = ("none", "without") if name.startswith("hf") else ("7", "with")
    total = sum(a.size for n, a in training_state(per_layer_relative_position_bias=True).items() if n[:6] == "target")
    assert head.splitlines() == [
        str(checkpoints[name]),
        f"format: {FORMATS[name]}",
        f"step:   {step}",
        "model:  umT5 of its own size",
        f"holds:  {total:,} parameters, {state} optimizer state; vocabularies: none",
    ]
    lines = table.splitlines()
    assert lines[-1] == f"Total number of parameters: {total:,}"
    (kernel,) = (line for line in lines if "decoder/layers_2/mlp/wo/kernel" in line)
    assert re.fullmatch(r"Variable +target/decoder/layers_2/mlp/wo/kernel +size 30,720 +shape \(192, 160\).*", kernel)


def test_json_has_the_same_hash_for_every_format_and_layout(checkpoints, capsys):
    reports = {}
    for name, path in checkpoints.items():
        result = run(capsys, "inspect", path, "--json")
        assert result.code == 0
        reports[name] = json.loads(result.out)
    assert len({report["params_sha256"] for report in reports.values()}) == 1
    assert {name: report["format"] for name, report in reports.items()} == FORMATS
    for name, report in reports.items():
        assert report["model"] == "umT5 of its own size"
        assert report["step"] == (None if name.startswith("hf") else 7)
        assert report["optimizer_state"] is not name.startswith("hf")
        assert report["config"]["num_decoder_layers"] == 3
        assert report["parameters"]["target/decoder/layers_0/mlp/wo/kernel"] == {
            "shape": [192, 160],
            "dtype": "float32",
        }


def test_the_newest_checkpoint_of_a_model_dir_is_taken(tmp_path, checkpoints, capsys):
    for step in (5, 12):
        write_native(tmp_path / "run" / f"checkpoint_{step}", step, [("target/kernel", np.ones((2, 3), np.float32))])
    convert(str(checkpoints["t5x"]), str(tmp_path / "run" / "checkpoint_20"), to="native")  # its content is of step 7
    result = run(capsys, "inspect", tmp_path / "run")
    assert result.code == 0 and result.out.startswith(str(tmp_path / "run" / "checkpoint_12"))
    assert "checkpoint_20" in result.err and "checkpoint_7" in result.err


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_path_without_a_checkpoint_raises_user_error(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    run(capsys, "inspect", tmp_path / name).refused(str(tmp_path / name))


def test_a_model_that_is_not_a_t5_is_shown(tmp_path, capsys):
    write_native(tmp_path / "other", 3, [("target/dense/kernel", np.ones((2, 3), np.float32))])
    result = run(capsys, "inspect", tmp_path / "other")
    assert result.code == 0 and "model:  unknown" in result.out and "target/dense/kernel" in result.out


# --- The hash ---------------------------------------------------------------------------------------------------------


def lazy(value: np.ndarray) -> LazyArray:
    return LazyArray(value.shape, value.dtype, lambda: value)


def test_the_hash_follows_numbers_names_and_shapes_and_not_dtypes_or_order():
    rng = np.random.default_rng(0)
    base = {"target/a": rng.random((4, 6)).astype(ml_dtypes.bfloat16), "target/b": np.float32(rng.random(5))}
    expected = params_sha256({n: lazy(v) for n, v in base.items()})
    for dtype in (np.float32, np.float64):
        assert params_sha256({n: lazy(v.astype(dtype)) for n, v in reversed(base.items())}) == expected
    strided = base | {"target/a": np.asfortranarray(base["target/a"])}
    assert params_sha256({n: lazy(v) for n, v in strided.items()}) == expected
    changed = base["target/b"].copy()
    changed[3] = np.nextafter(changed[3], np.float32(2))
    for other in (
        {"target/b": changed},
        {"target/a": base["target/a"].reshape(6, 4)},
        {"target/c": base["target/b"]},
    ):
        assert params_sha256({n: lazy(v) for n, v in (base | other).items()}) != expected


def test_the_hash_of_a_large_array_is_that_of_its_bytes():
    """It is computed in parts."""
    import hashlib

    array = np.random.default_rng(0).standard_normal((5, 2_000_000), np.float32)
    inner = hashlib.sha256(array.tobytes()).hexdigest()
    line = f"target/a [5, 2000000] {inner}\n".encode()
    assert params_sha256({"target/a": lazy(array)}) == hashlib.sha256(line).hexdigest()


def test_every_stack_is_read_once(checkpoints):
    """Whole stacks are read; read for every layer anew, a model of 24 layers would take 24 times as long."""
    source = open_checkpoint(checkpoints["native scanned"])
    reads = []

    def counted(name: str, array: LazyArray) -> LazyArray:
        return LazyArray(array.shape, array.dtype, lambda: reads.append(name) or array.read())

    arrays = {n: counted(n, a) for n, a in source.arrays.items() if n.startswith(layout.PARAMS)}
    params_sha256(canonical_params(dataclasses.replace(source, arrays=arrays)))
    assert sorted(reads) == sorted(arrays)


def test_a_mesh_tensorflow_checkpoint(tmp_path, capsys):
    from tests.checkpoints.formats.bundle_writer import write_bundle

    rng = np.random.default_rng(0)
    variables = {"shared/embedding": rng.random((10, 4), np.float32), "global_step": np.int64(3)}
    for tower, blocks in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        variables[f"{tower}/block_000/layer_000/SelfAttention/relative_attention_bias"] = np.ones((3, 32), np.float32)
        variables[f"{tower}/rms_norm/scale"] = np.ones(4, np.float32)
        for i, block in enumerate(blocks):
            layer = f"{tower}/block_000/layer_{i:03d}"
            variables[f"{layer}/rms_norm/scale"] = np.ones(4, np.float32)
            variables |= {f"{layer}/{block}/{part}": rng.random((4, 6), np.float32) for part in "qkv"}
            variables[f"{layer}/{block}/o"] = rng.random((6, 4), np.float32)
        layer = f"{tower}/block_000/layer_{len(blocks):03d}"
        variables[f"{layer}/rms_norm/scale"] = np.ones(4, np.float32)
        variables[f"{layer}/DenseReluDense/wi/kernel"] = rng.random((4, 6), np.float32)
        variables[f"{layer}/DenseReluDense/wo/kernel"] = rng.random((6, 4), np.float32)
    write_bundle(tmp_path / "model.ckpt-3", {n: np.asarray(v) for n, v in variables.items()})
    result = run(capsys, "inspect", tmp_path)
    assert result.code == 0
    assert "format: Mesh TensorFlow\nstep:   3\nmodel:  T5 1.0 of its own size" in result.out
    assert run(capsys, "convert", tmp_path / "model.ckpt-3", tmp_path / "hf", "--to", "hf").code == 0
    hashes = {params_sha256(canonical_params(open_checkpoint(path))) for path in (tmp_path / "hf", tmp_path)}
    assert len(hashes) == 1
