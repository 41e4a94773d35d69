"""`t5x convert` refuses what is not whole or would not be read again, and says what the result cannot hold."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import families, tree
from t5x.checkpoints.families import t5_parameters
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.formats.native_t5x import write_native
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.checkpoints.model_description import describe_network
from t5x.data import PassThroughVocabulary
from t5x.models import DecoderOnlyModel
from t5x.network import DecoderWrapper, TransformerConfig
from tests.checkpoints.formats import huggingface_models as models
from tests.support.commands import run

SIZES = {"vocab_size": 10, "emb_dim": 4, "num_heads": 3, "head_dim": 2, "mlp_dim": 6}
CONFIG = SIZES | {
    "num_encoder_layers": 2, "num_decoder_layers": 3, "mlp_activations": ("gelu", "linear"),
    "logits_via_embedding": False,
}  # fmt: skip
ALONE = SIZES | {"num_layers": 3, "mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}


def params() -> dict[str, np.ndarray]:
    return {p.name: np.ones(p.shape, np.float32) for p in t5_parameters(CONFIG)}


def params_alone(**changes) -> dict[str, np.ndarray]:
    """Those of our decoder-only network itself."""
    config = TransformerConfig(**ALONE | changes)
    model = DecoderOnlyModel(DecoderWrapper(config), PassThroughVocabulary(10), optimizer_def=None)
    shapes = model.input_shapes({"inputs": 3, "targets": 3})
    made = jax.eval_shape(lambda key: model.get_initial_variables(key, shapes)["params"], jax.random.key(0))
    return {name: np.ones(leaf.shape, np.float32) for name, leaf in tree.flatten({"target": made}).items()}


def without(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    kept = {name: array for name, array in arrays.items() if part not in name}
    assert len(kept) < len(arrays)
    return kept


def ours(path: Path, step: int, arrays: dict[str, np.ndarray], config: dict, files=None, **described) -> Path:
    content = json.dumps(describe_network(config, **described)).encode()
    write_own_checkpoint(path, step, arrays.items(), sidecars={"model.json": content} | (files or {}))
    return path


# --- The step in the name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_name_with_another_step_is_refused(tmp_path, capsys, overwrite):
    source, out = tmp_path / "in", tmp_path / "run"
    write_native(source, 7, params().items())
    out.mkdir()
    if overwrite:
        ours(out / "checkpoint_10", 10, params(), CONFIG)
    before = sorted(os.listdir(out))
    flags = ["--overwrite"] if overwrite else []
    result = run(capsys, "convert", source, out / "checkpoint_10", "--to", "t5x", *flags)
    result.refused("the step is 7", str(out / "checkpoint_7"))
    assert sorted(os.listdir(out)) == before
    assert run(capsys, "convert", source, out / "checkpoint_7", "--to", "t5x").code == 0
    assert open_checkpoint(out / "checkpoint_7").step == 7


def test_write_checkpoint_refuses_it_too(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint_3\b"):
        write_own_checkpoint(tmp_path / "checkpoint_4", 3, params().items(), sidecars={})
    assert os.listdir(tmp_path) == []


# --- All parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["t5x", "native", "hf"])
@pytest.mark.parametrize(
    "part, words",
    [
        ("decoder/layers_1/", "decoder/layers_1 is missing"),
        ("encoder/layers_0/", "encoder/layers_0 is missing"),
        ("decoder/layers_2/mlp/wi_1/", "1 missing:"),
        ("encoder/encoder_norm/", "target/encoder/encoder_norm/scale"),
        ("encoder/layers_0/mlp/wi_0/", "encoder/layers_0/mlp/wi/kernel"),
    ],
)
def test_an_incomplete_source_is_refused(tmp_path, capsys, to, part, words):
    write_native(tmp_path / "in", 7, without(params(), part).items())
    run(capsys, "convert", tmp_path / "in", tmp_path / "out", "--to", to).refused(str(tmp_path / "in"), words)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("to", ["t5x", "native"])
def test_a_decoder_alone_is_checked_alike(tmp_path, capsys, to):
    whole = params_alone()
    write_native(tmp_path / "in", 7, whole.items())
    assert run(capsys, "convert", tmp_path / "in", tmp_path / "out", "--to", to).code == 0
    for part in ("layers_1/", "layers_2/self_attention/key/", "decoder_norm/"):
        source = tmp_path / part.replace("/", "-")
        write_native(source, 7, without(whole, part).items())
        run(capsys, "convert", source, tmp_path / "other", "--to", to).refused(str(source), part.strip("/"))
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("changes", [{}, {"per_layer_relative_position_bias": True}, {"logits_via_embedding": True}])
def test_the_list_for_a_decoder_alone_is_that_of_our_network(changes):
    expected = families.parameters_of(ALONE | changes)
    assert tree.difference(tree.nest(params_alone(**changes)), tree.nest(expected)) == ""


def test_more_than_the_model_has_goes_to_native_alone(tmp_path, capsys):
    adapter = {"target/decoder/layers_0/adapter/kernel": np.ones((4, 2), np.float32)}
    write_native(tmp_path / "in", 7, (params() | adapter).items())
    for to in ("t5x", "hf"):
        run(capsys, "convert", tmp_path / "in", tmp_path / to, "--to", to).refused("1 unexpected", "adapter/kernel")
    assert run(capsys, "convert", tmp_path / "in", tmp_path / "native", "--to", "native").code == 0
    assert open_checkpoint(tmp_path / "native").arrays.keys() == open_checkpoint(tmp_path / "in").arrays.keys()


# --- What --overwrite removes, what native cannot hold, and names -----------------------------------------------------


def test_overwrite_leaves_a_directory_with_a_file_of_that_name(tmp_path, capsys):
    write_native(tmp_path / "in", 7, params().items())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "checkpoint").write_text("my notes")
    (mine / "thesis.txt").write_text("years")
    run(capsys, "convert", tmp_path / "in", mine, "--to", "native", "--overwrite").refused(str(mine), "--overwrite")
    assert sorted(os.listdir(mine)) == ["checkpoint", "thesis.txt"]


def test_what_native_cannot_store_is_named(tmp_path, capsys):
    config = ALONE | {"mlp_activations": ("silu", "linear")}
    vocabulary = {f"vocabulary/targets/{name}": data for name, data in PassThroughVocabulary(10).to_files().items()}
    source = ours(tmp_path / "in", 7, params_alone(), config, vocabulary, inputs_bidirectional_attention=True)
    result = run(capsys, "convert", source, tmp_path / "out", "--to", "native")
    assert result.code == 0
    for words in ("('silu', 'linear')", "the vocabulary of targets", "inputs_bidirectional_attention"):
        assert words in result.err
    plain = ours(tmp_path / "plain", 7, params(), CONFIG)
    assert "cannot store" not in run(capsys, "convert", plain, tmp_path / "other", "--to", "native").err


@pytest.mark.parametrize("vocab_size", [64, 384])
def test_an_mt5_with_a_trimmed_vocabulary_is_named_so(tmp_path, capsys, vocab_size):
    models.model("mT5", vocab_size=vocab_size).save_pretrained(tmp_path / "hf")
    assert "model:  mT5 of its own size" in run(capsys, "inspect", tmp_path / "hf").out


def test_inspect_of_another_file_raises_user_error(tmp_path, capsys):
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    run(capsys, "inspect", tmp_path / "passwd").refused(f"{tmp_path / 'passwd'} is not a checkpoint")
    run(capsys, "inspect", "").refused("path of the checkpoint is empty")
