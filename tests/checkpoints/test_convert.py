"""`t5x convert`: every number arrives in every format and layout, and a destination is whole or as it was."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking.templates import Template
from t5x.checkpoints import convert as conversion
from t5x.checkpoints import layout
from t5x.checkpoints.convert import convert
from t5x.checkpoints.families import t5_parameters
from t5x.checkpoints.formats import LazyArray, open_checkpoint
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.checkpoints.model_description import load_model
from t5x.cli.inspect_verb import canonical_params, params_sha256
from t5x.optimizers.adafactor import Adafactor
from tests.checkpoints.formats import huggingface_models as models
from tests.support import disks
from tests.support.commands import run
from tests.support.paths import REPO
from tests.support.programs import run_python

# Kernels whose sides are all at least 128, which Adafactor factors, and with either side the larger one; an embedding
# and tables of relative positions that it does not.
CONFIG = {
    "vocab_size": 40, "emb_dim": 160, "num_heads": 4, "head_dim": 32, "mlp_dim": 192, "num_encoder_layers": 2,
    "num_decoder_layers": 3, "mlp_activations": ("gelu", "linear"), "logits_via_embedding": False,
}  # fmt: skip


def sha256(path) -> str:
    return params_sha256(canonical_params(open_checkpoint(path)))


def values(path) -> dict[str, np.ndarray]:
    return {name: np.asarray(array.read()) for name, array in open_checkpoint(path).arrays.items()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert found[name].tobytes() == array.tobytes(), name


def training_state(**changes) -> dict[str, np.ndarray]:
    """Random parameters of CONFIG, and Adafactor's state for them."""
    rng = np.random.default_rng(0)
    arrays = {}
    for parameter in t5_parameters(CONFIG | changes):
        arrays[parameter.name] = rng.standard_normal(parameter.shape, np.float32)
        path = parameter.name.removeprefix("target/")
        for slot, zeros in Adafactor().init({path: arrays[parameter.name]}, {path: None})[path].items():
            filled = rng.random(zeros.shape, np.float32) if zeros.shape != (1,) else np.zeros(1, np.float32)
            arrays[f"state/param_states/{path}/{slot}"] = filled
    return arrays


def write_ours(path: Path, arrays: dict[str, np.ndarray], **changes) -> Path:
    from t5x.checkpoints.model_description import describe_network

    described = json.dumps(describe_network(CONFIG | changes)).encode()
    write_own_checkpoint(path, 7, arrays.items(), sidecars={"model.json": described})
    return path


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "hf"
    models.model("T5 1.1").save_pretrained(path)
    return path


# --- Every number arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, ours, native",
    [
        ("T5 1.0", "unrolled", "unrolled"),
        ("T5 1.1", "scanned", "unrolled"),
        ("umT5", "unrolled", "scanned"),
        ("umT5", "scanned", "scanned"),
    ],
)
def test_round_trips_are_exact_and_transformers_computes_the_same(tmp_path, family, ours, native):
    import transformers

    made = models.model(family)
    made.save_pretrained(tmp_path / "0")
    steps = [("t5x", ours), ("native", native), ("t5x", "unrolled"), ("t5x", ours), ("hf", "unrolled")]
    for number, (to, layers) in enumerate(steps):
        convert(str(tmp_path / str(number)), str(tmp_path / str(number + 1)), to=to, layers=layers)
    assert len({sha256(tmp_path / str(number)) for number in range(len(steps) + 1)}) == 1
    assert_equal(values(tmp_path / "5"), values(tmp_path / "0"))
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "5").eval()
    for model in (made, again):
        model.config.tie_word_embeddings = family == "T5 1.0"  # version 5 would scale the logits of every umT5
    np.testing.assert_array_equal(models.logits(again)[0], models.logits(made)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_optimizer_state_arrives_exactly(tmp_path, layers):
    changes = {"per_layer_relative_position_bias": True}
    arrays = training_state(**changes)
    assert arrays["state/param_states/encoder/layers_0/mlp/wo/kernel/v_row"].shape == (160,)
    assert arrays["state/param_states/token_embedder/embedding/v"].shape == (40, 160)
    write_ours(tmp_path / "0", arrays, **changes)
    for number, (to, form) in enumerate([("native", layers), ("t5x", layers), ("native", layers), ("t5x", "unrolled")]):
        convert(str(tmp_path / str(number)), str(tmp_path / str(number + 1)), to=to, layers=form)
    assert_equal(values(tmp_path / "4"), arrays | {"state/step": np.asarray(7, np.int32)})
    assert_equal(values(tmp_path / "3"), values(tmp_path / "1"))


def test_native_scanned_layers_are_those_of_scalable_t5(tmp_path):
    """Three-dimensional attention kernels, layers at axis 1, rows of the second moment along the embedding."""
    changes = {"per_layer_relative_position_bias": True}
    arrays = training_state(**changes)
    convert(str(write_ours(tmp_path / "ours", arrays, **changes)), str(tmp_path / "out"), to="native", layers="scanned")
    found = values(tmp_path / "out")
    decoder, slots = "target/decoder/decoder", "state/param_states/decoder/decoder"
    shapes = {
        "target/token_embedder/embedding": (40, 160),
        "target/decoder/decoder_norm/scale": (160,),
        "target/decoder/logits_dense/kernel": (160, 40),
        f"{decoder}/pre_mlp_layer_norm/scale": (160, 3),
        f"{decoder}/relpos_bias/rel_embedding": (4, 3, 32),
        f"{decoder}/self_attention/query/kernel": (160, 3, 4, 32),
        f"{decoder}/encoder_decoder_attention/out/kernel": (4, 3, 32, 160),
        f"{decoder}/mlp/wi_1/kernel": (160, 3, 192),
        f"{decoder}/mlp/wo/kernel": (192, 3, 160),
        f"{slots}/self_attention/query/kernel/v_row": (160, 3),
        f"{slots}/self_attention/query/kernel/v_col": (3, 4, 32),
        f"{slots}/self_attention/out/kernel/v_row": (3, 160),
        f"{slots}/self_attention/out/kernel/v_col": (4, 3, 32),
        f"{slots}/mlp/wi_0/kernel/v_row": (160, 3),
        f"{slots}/mlp/wi_0/kernel/v_col": (3, 192),
        f"{slots}/mlp/wo/kernel/v_row": (3, 160),
        f"{slots}/mlp/wo/kernel/v_col": (192, 3),
        f"{slots}/mlp/wo/kernel/v": (1,),
        f"{slots}/relpos_bias/rel_embedding/v": (4, 3, 32),
    }
    assert {name: found[name].shape for name in shapes} == shapes
    one = "target/decoder/layers_2/self_attention"
    query, out = (found[f"{decoder}/self_attention/{part}/kernel"][:, 2] for part in ("query", "out"))
    np.testing.assert_array_equal(query, arrays[f"{one}/query/kernel"].reshape(160, 4, 32))
    np.testing.assert_array_equal(out, arrays[f"{one}/out/kernel"].reshape(4, 32, 160))
    np.testing.assert_array_equal(
        found[f"{slots}/mlp/wo/kernel/v_col"][:, 1], arrays["state/param_states/decoder/layers_1/mlp/wo/kernel/v_col"]
    )


def test_ours_scanned_is_what_our_scanned_network_holds(tmp_path, hf):
    import jax

    from t5x.checkpoints import tree
    from tests.support import tiny

    convert(str(hf), str(tmp_path / "out"), to="t5x", layers="scanned")
    config = json.loads((tmp_path / "out" / "model.json").read_text())["config"]
    assert config["scan_layers"] is True
    with pytest.raises(UserError, match="vocabulary"):  # all else of the model can be rebuilt
        load_model(open_checkpoint(tmp_path / "out"))
    network = tiny.model(type(tiny.T5_1_1)(**config))
    shapes = network.input_shapes({"inputs": 3, "targets": 3})
    wanted = jax.eval_shape(lambda key: network.get_initial_variables(key, shapes)["params"], jax.random.key(0))
    found = {n: a for n, a in open_checkpoint(tmp_path / "out").arrays.items() if n.startswith("target/")}
    assert tree.difference({"target": wanted}, tree.nest(found)) == ""


def test_optax_moments_are_stacked_with_their_parameters():
    """T5X keeps AdamW's as param_states/0/mu/<parameter>."""
    rng = np.random.default_rng(0)
    arrays = {}
    for root in ("target", "state/param_states/0/mu"):
        for number in range(2):
            value = rng.random((6, 8))
            name = f"{root}/encoder/layers_{number}/attention/out/kernel"
            arrays[name] = LazyArray((6, 8), value.dtype, lambda value=value: value)
    count = LazyArray((), np.dtype(np.int32), lambda: np.asarray(3, np.int32))
    arrays["state/param_states/0/count"] = count
    stacked = layout.stacked(arrays, heads=3)
    assert stacked["state/param_states/0/mu/encoder/encoder/attention/out/kernel"].shape == (3, 2, 2, 8)
    back = layout.canonical(stacked)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name].read(), array.read())


def test_arrays_outside_layers_are_converted(tmp_path):
    """Flax's mutable collections, and the step."""
    mutable = {"flax_mutables/statistics/mean": np.arange(3, dtype=np.float32)}
    arrays = training_state() | mutable
    convert(str(write_ours(tmp_path / "0", arrays)), str(tmp_path / "1"), to="native")
    convert(str(tmp_path / "1"), str(tmp_path / "2"), to="t5x", layers="scanned")
    assert_equal({n: a for n, a in values(tmp_path / "2").items() if n.startswith("flax_mutables/")}, mutable)
    assert open_checkpoint(tmp_path / "2").step == 7


@pytest.mark.parametrize("to", ["t5x", "native", "hf"])
def test_bfloat16_is_rounded_to(tmp_path, hf, to):
    convert(str(hf), str(tmp_path / "out"), to=to, dtype="bfloat16")
    found = {name: array for name, array in values(tmp_path / "out").items() if name != "state/step"}
    assert_equal(found, {name: array.astype(ml_dtypes.bfloat16) for name, array in values(hf).items()})


def test_layers_that_differ_are_not_stacked():
    array = LazyArray((3,), np.dtype(np.float32), lambda: np.zeros(3, np.float32))
    names = ["layers_0/pre_mlp_layer_norm/scale", "layers_1/pre_mlp_layer_norm/scale", "layers_1/adapter/scale"]
    with pytest.raises(UserError, match=r"2 layers of the encoder cannot be stacked: adapter/scale is in 0 of them"):
        layout.stacked({f"target/encoder/{name}": array for name in names})


# --- What a user sees -------------------------------------------------------------------------------------------------


def test_format_progress_and_result_are_logged(tmp_path, hf, capsys):
    result = run(capsys, "convert", hf, tmp_path / "out", "--to", "native")
    assert (result.code, result.out) == (0, "")
    arrays = len(values(hf))
    assert "Hugging Face (t5, safetensors), step None, T5 1.1 of its own size" in result.err
    assert f"convert: array {arrays}/{arrays}" in result.err
    assert f"wrote {tmp_path / 'out'} (native, unrolled layers)" in result.err
    assert os.listdir(tmp_path) == ["out"]


@pytest.fixture
def occupied(tmp_path, hf) -> Path:
    """A whole checkpoint at the destination."""
    convert(str(hf), str(tmp_path / "out"), to="hf", dtype="bfloat16")
    return tmp_path / "out"


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("to", ["t5x", "native", "hf"])
def test_an_existing_destination_is_replaced_when_asked_only(occupied, hf, capsys, to):
    before = snapshot(occupied)
    run(capsys, "convert", hf, occupied, "--to", to).refused("exists already", "--overwrite")
    assert snapshot(occupied) == before
    assert run(capsys, "convert", hf, occupied, "--to", to, "--overwrite").code == 0
    assert sha256(occupied) == sha256(hf)
    assert os.listdir(occupied.parent) == ["out"]


REFUSALS = {
    "the source itself": ("{hf}", ["--to", "hf", "--overwrite"], "{hf} is the source"),
    "inside the source": ("{hf}/out", ["--to", "hf"], "{hf}/out lies inside"),
    "around the source": ("{above}", ["--to", "hf", "--overwrite"], "not a checkpoint"),
    "a file": ("{tmp}/file", ["--to", "hf", "--overwrite"], "not a directory"),
    "below a file": ("{tmp}/file/out", ["--to", "t5x"], "not a directory that you may write to"),
    "a link": ("{tmp}/link", ["--to", "native", "--overwrite"], "not a directory"),
    "somebody's directory": ("{tmp}/mine", ["--to", "t5x", "--overwrite"], "not a checkpoint"),
    "scanned for Hugging Face": ("{tmp}/out", ["--to", "hf", "--layers", "scanned"], "--layers scanned"),
    "scanned without biases": ("{tmp}/out", ["--to", "native", "--layers", "scanned"], "scalable_t5"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_destinations_that_are_refused(tmp_path, hf, capsys, case):
    destination, flags, words = REFUSALS[case]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(hf)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("mine")
    before = snapshot(tmp_path), snapshot(hf.parent)
    destination = destination.format(tmp=tmp_path, hf=hf, above=hf.parent)
    run(capsys, "convert", hf, destination, *flags).refused(words.format(hf=hf))
    assert (snapshot(tmp_path), snapshot(hf.parent)) == before
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "mine"]


def test_a_checkpoint_around_the_source_is_not_replaced(occupied, hf, capsys):
    inner = occupied / "inner"
    convert(str(hf), str(inner), to="hf")
    run(capsys, "convert", inner, occupied, "--to", "hf", "--overwrite").refused(str(inner))
    assert sha256(inner) == sha256(hf)


@pytest.mark.parametrize(
    "flags", [["--to", "hf", "--dtype", "int8"], ["--to", "onnx"], ["--to", "t5x", "--layers", "x"]]
)
def test_unknown_choices(tmp_path, hf, capsys, flags):
    result = run(capsys, "convert", hf, tmp_path / "out", *flags)
    assert result.code == 2 and "invalid choice" in result.err and "Traceback" not in result.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"layers": "x"}, {"to": "onnx"}])
def test_unknown_choices_from_python(tmp_path, hf, arguments):
    with pytest.raises(UserError, match="must be one of"):
        convert(str(hf), str(tmp_path / "out"), **{"to": "hf", **arguments})


def test_a_description_of_other_sizes_is_refused_with_the_fields(tmp_path, capsys):
    write_ours(tmp_path / "source", training_state(), mlp_dim=200, num_heads=8)
    result = run(capsys, "convert", tmp_path / "source", tmp_path / "out", "--to", "native")
    result.refused("mlp_dim: 200 is stated, the arrays have 192", "num_heads: 8 is stated, the arrays have 4")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"config": 3}', b'{"config": {"wings": 2}}'])
def test_an_invalid_description_is_refused(tmp_path, capsys, content):
    write_own_checkpoint(tmp_path / "source", 7, training_state().items(), sidecars={"model.json": content})
    result = run(capsys, "convert", tmp_path / "source", tmp_path / "out", "--to", "t5x")
    result.refused("model.json does not describe a network")
    assert os.listdir(tmp_path) == ["source"]


# --- Whole, or as it was ----------------------------------------------------------------------------------------------


def failing(monkeypatch, error: BaseException, after: int = 3) -> None:
    """Makes the reading of the array number `after` of any checkpoint fail."""
    canonical = conversion.transfer.canonical_arrays

    def broken(source):
        arrays = canonical(source)
        name = list(arrays)[after]

        def read():
            raise error

        return arrays | {name: LazyArray(arrays[name].shape, arrays[name].dtype, read)}

    monkeypatch.setattr(conversion.transfer, "canonical_arrays", broken)


@pytest.mark.parametrize("to", ["t5x", "native", "hf"])
@pytest.mark.parametrize("error", [UserError("the source is gone"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_failure_half_way_leaves_what_was_there_and_nothing_else(occupied, hf, capsys, monkeypatch, to, error):
    before = snapshot(occupied.parent)
    failing(monkeypatch, error)
    for destination, flags in ((occupied, ["--overwrite"]), (occupied.parent / "new", [])):
        result = run(capsys, "convert", hf, destination, "--to", to, *flags)
        if isinstance(error, UserError):
            result.refused("the source is gone")
        else:
            assert result.code == 130 and "interrupted" in result.err and "Traceback" not in result.err
        assert snapshot(occupied.parent) == before
        assert os.listdir(occupied.parent) == ["out"]


KILLED = """
import os, signal, sys
from t5x.checkpoints import convert
from t5x.cli import main as cli
from t5x.checkpoints.formats import LazyArray
canonical = convert.transfer.canonical_arrays
def broken(source):
    arrays = canonical(source)
    name = list(arrays)[3]
    def read():
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        return arrays[name].read()
    return arrays | {name: LazyArray(arrays[name].shape, arrays[name].dtype, read)}
convert.transfer.canonical_arrays = broken
cli.main(["convert", *sys.argv[2:]])
"""


@pytest.mark.parametrize(
    "signum, to",
    [pytest.param("SIGINT", "t5x", marks=pytest.mark.slow), ("SIGTERM", "native"), ("SIGKILL", "t5x")],
)
def test_signals(occupied, hf, capsys, signum, to):
    before = snapshot(occupied)
    done = run_python("-c", KILLED, signum, hf, occupied, "--to", to, "--overwrite", cwd=REPO)
    assert done.returncode == {"SIGINT": 130, "SIGTERM": 75, "SIGKILL": -signal.SIGKILL}[signum], done.stderr
    assert "Traceback" not in done.stderr
    assert snapshot(occupied) == before
    if signum != "SIGKILL":
        assert os.listdir(occupied.parent) == ["out"]
        return
    (left,) = set(os.listdir(occupied.parent)) - {"out"}
    result = run(capsys, "convert", hf, occupied, "--to", to, "--overwrite")
    assert result.code == 0 and f"{left} was left by a conversion that was killed" in result.err
    assert sha256(occupied) == sha256(hf)
    assert set(os.listdir(occupied.parent)) == {"out", left}


def test_full_disk_is_reported_before_and_during_writing(tmp_path, hf, capsys, monkeypatch):
    with disks.mounted(tmp_path / "disk", "40k") as disk:
        run(capsys, "convert", hf, disk / "out", "--to", "t5x").refused(str(disk), "are free")
        monkeypatch.setattr(conversion, "_check_room", lambda *args, **kwargs: None)
        for to in ("t5x", "native", "hf"):
            run(capsys, "convert", hf, disk / "out", "--to", to).refused(f"{disk / 'out'} could not be written")
            assert os.listdir(disk) == []


def test_a_ranker_keeps_its_template(tmp_path, hf):
    template = Template("{query} ? {document}", "yes", "no", 64)
    ranker = tmp_path / "ranker"
    shutil.copytree(hf, ranker)
    config = json.loads((ranker / "config.json").read_text())
    (ranker / "config.json").write_text(json.dumps({**config, "ranking_template": dataclasses.asdict(template)}))
    convert(ranker, tmp_path / "ours", to="t5x")
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    for name in ("ranker", "ours", "back"):
        assert open_checkpoint(tmp_path / name).template == dataclasses.asdict(template)
