"""Other people's weights in our network: parity with Hugging Face, real published weights, training from them."""

import functools
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import t5x
from t5x._runtime.errors import UserError
from t5x.checkpoints import convert
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.model_description import load_model
from t5x.checkpoints.transfer import config_of, restore
from t5x.cli.inspect_verb import inspect
from t5x.network import T5Config
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from t5x.trainer.restore import restore_params
from tests.checkpoints.formats import huggingface_models
from tests.support.marks import mark_slow
from tests.support.paths import SHARED
from tests.support.programs import losses

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")


def ours(path: Path, **config):
    """(model, parameters) of a checkpoint directory without its vocabulary."""
    from t5x.data import PassThroughVocabulary
    from t5x.decoding import greedy_decode
    from t5x.models import EncoderDecoderModel
    from t5x.network import Transformer

    source = open_checkpoint(path)
    fields = config_of(source) | config
    vocabulary = PassThroughVocabulary(fields["vocab_size"], eos_id=1)
    model = EncoderDecoderModel(Transformer(T5Config(**fields)), vocabulary, vocabulary, None, greedy_decode)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))
    return model, restore(source, {"target": layout.abstract.params}, {"target": layout.axes})["target"]


FAMILIES = {
    "T5 1.0": {"d_model": 24, "num_heads": 3, "d_kv": 5, "num_layers": 2, "num_decoder_layers": 3},
    "T5 1.1": {"d_model": 20, "num_heads": 1, "d_kv": 7, "num_layers": 3, "num_decoder_layers": 1},
    "mT5": {},
    "umT5": {"num_layers": 2, "num_decoder_layers": 3},
}


@pytest.mark.parametrize(
    "family, scan",
    mark_slow(
        list(itertools.product(FAMILIES, [False, True])),
        # network/test_family_parity.py compares the logits of T5 1.0 and umT5.
        slow=[("T5 1.1", True), ("mT5", False), *itertools.product(["T5 1.0", "umT5"], [False, True])],
    ),
)
def test_parity_with_hugging_face(family, scan, tmp_path):
    made = huggingface_models.model(family, **FAMILIES[family]).eval()
    made.save_pretrained(tmp_path / "hf")
    if family == "umT5":
        made.config.tie_word_embeddings = False  # version 5 of transformers would scale the logits of an untied umT5
    model, params = ours(tmp_path / "hf", scan_layers=scan)
    rng = np.random.default_rng(0)
    vocab = made.config.vocab_size
    inputs = rng.integers(2, vocab, (3, 40)).astype(np.int32) * (np.arange(40) < [[40], [17], [3]])
    targets = rng.integers(2, vocab, (3, 150)).astype(np.int32)
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    batch = {
        "encoder_input_tokens": inputs, "decoder_input_tokens": shifted, "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones_like(targets),
    }  # fmt: skip
    with torch.no_grad():
        theirs = made(
            input_ids=torch.from_numpy(inputs).long(), attention_mask=torch.from_numpy(inputs > 0).long(),
            decoder_input_ids=torch.from_numpy(shifted).long(),
        ).logits.numpy()  # fmt: skip
    both = jax.jit(lambda *given: (model.compute_logits(*given), model.score_batch(*given)))
    logits, scores = both(params, batch)
    np.testing.assert_allclose(logits, theirs, atol=1e-4)
    log_probs = torch.log_softmax(torch.from_numpy(theirs).double(), -1).numpy()
    expected = np.take_along_axis(log_probs, targets[..., None], -1)[..., 0].sum(-1)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@needs_data
@pytest.mark.slow
def test_the_real_weights_reproduce_what_hugging_face_computed(tmp_path):
    model, params = ours(huggingface_models.real_directory(tmp_path / "titler", SHARED), scan_layers=True)
    cases = json.loads((SHARED / "flan_t5_small_titler" / "expected.json").read_text())["cases"]
    inputs = np.zeros((len(cases), max(len(case["input_ids"]) for case in cases)), np.int32)
    for row, case in enumerate(cases):
        inputs[row, : len(case["input_ids"])] = case["input_ids"]
    start = np.zeros((len(cases), 1), np.int32)

    @jax.jit
    def run(params):
        apply = functools.partial(model.module.apply, {"params": params}, enable_dropout=False)
        encoded = apply(inputs, method="encode")
        logits = apply(encoded, inputs, start, start + 1, method="decode")
        return encoded, jax.nn.log_softmax(logits[:, 0])

    encoded, log_probs = run(params)
    for row, case in enumerate(cases):
        real = np.asarray(encoded[row, : len(case["input_ids"])])
        np.testing.assert_allclose(real.mean(), case["enc_mean"], atol=1e-5)
        np.testing.assert_allclose(real.reshape(-1)[:8], case["enc_first8"], atol=1e-4)
        np.testing.assert_allclose(log_probs[row, 1176], case["first_step_logprob_true_1176"], atol=2e-3)
        np.testing.assert_allclose(log_probs[row, 6136], case["first_step_logprob_false_6136"], atol=2e-3)


@needs_data
def test_inspect_reports_the_native_fixture():
    fixture = SHARED / "t5x_testdata" / "test_t5_tiny.checkpoint_0"
    report = inspect(str(fixture), as_json=True)
    assert (report["model"], report["num_params"], report["optimizer_state"]) == ("T5 1.1 tiny", 518240, True)


def test_round_trips_are_bit_exact(tmp_path, capsys):
    huggingface_models.model("T5 1.1").save_pretrained(tmp_path / "hf")
    for number, (source, to) in enumerate([("hf", "t5x"), ("1", "native"), ("2", "t5x"), ("3", "hf")], start=1):
        convert.convert(str(tmp_path / source), str(tmp_path / str(number)), to=to)
    hashes = set()
    for name in ("hf", "1", "2", "3", "4"):
        hashes.add(inspect(str(tmp_path / name), as_json=True)["params_sha256"])
    assert len(hashes) == 1
    first, last = (open_checkpoint(tmp_path / name).arrays for name in ("hf", "4"))
    assert first.keys() == last.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array.read(), last[name].read())


@pytest.mark.slow
def test_training_starts_from_a_hugging_face_directory(run_here, tmp_path):
    """Bytes: a ByT5-like model, which needs no vocabulary file. The layers are stacked on the way in."""
    made = huggingface_models.model("T5 1.1", vocab_size=384)
    made.save_pretrained(tmp_path / "hf")
    config = made.config
    sizes = {
        "emb_dim": config.d_model, "num_heads": config.num_heads, "head_dim": config.d_kv, "mlp_dim": config.d_ff,
        "num_encoder_layers": config.num_layers, "num_decoder_layers": config.num_decoder_layers, "scan_layers": True,
    }  # fmt: skip
    done = run_here(
        "train", "--gin_file=t5x/examples/demo/dates.gin", f"--gin.MODEL_DIR={tmp_path / 'run'}",
        *(f"--gin.network.T5Config.{name}={value}" for name, value in sizes.items()),
        "--gin.utils.CheckpointConfig.restore=@utils.RestoreCheckpointConfig()",
        f"--gin.utils.RestoreCheckpointConfig.path={tmp_path / 'hf'}", "--gin.TRAIN_STEPS=2", "--gin.BATCH_SIZE=8",
        "--gin.train.stats_period=1", "--gin.train.train_eval_dataset_cfg=None",
        "--gin.train.infer_eval_dataset_cfg=None",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "Hugging Face" in done.err and "optimizer state: reset" in done.err
    assert len(losses(tmp_path / "run")) == 2


def test_a_checkpoint_of_another_shape_is_refused_with_a_table(tmp_path):
    huggingface_models.model("T5 1.1").save_pretrained(tmp_path / "hf")
    source = open_checkpoint(tmp_path / "hf")
    from tests.support import tiny

    layout = StateLayout.of(tiny.model(), PjitPartitioner(), tiny.model().input_shapes({"inputs": 3, "targets": 3}))
    with pytest.raises(Exception, match=r"does not fit the model.*looks like\s+T5 1.1 of its own size"):
        restore(source, {"target": layout.abstract.params}, {"target": layout.axes})


def restored(path, config):
    from tests.support import tiny

    model = tiny.model(config)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))
    return restore_params(open_checkpoint(path), model, layout)


def test_a_converted_checkpoint_without_a_vocabulary_restores_into_a_model_that_has_one(tmp_path):
    huggingface_models.model("T5 1.1").save_pretrained(tmp_path / "hf")
    convert.convert(str(tmp_path / "hf"), str(tmp_path / "ours"), to="t5x")
    config = T5Config(**config_of(open_checkpoint(tmp_path / "hf")))
    ours, theirs = restored(tmp_path / "ours", config), restored(tmp_path / "hf", config)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    "family, per_layer, message",
    [
        ("T5 1.1", True, "per_layer_relative_position_bias=False"),
        ("umT5", False, "per_layer_relative_position_bias=True"),
    ],
)
def test_shared_and_per_layer_biases_are_refused_with_the_reason(family, per_layer, message, tmp_path):
    huggingface_models.model(family).save_pretrained(tmp_path / "hf")
    fields = config_of(open_checkpoint(tmp_path / "hf")) | {"per_layer_relative_position_bias": per_layer}
    with pytest.raises(UserError, match=message) as error:
        restored(tmp_path / "hf", T5Config(**fields))
    assert "fallback_to_scratch" not in str(error.value)


def test_a_directory_without_a_vocabulary_is_reported(tmp_path):
    huggingface_models.model("T5 1.1").save_pretrained(tmp_path / "hf")
    with pytest.raises(Exception, match="vocabulary for inputs and targets"):
        load_model(open_checkpoint(tmp_path / "hf"))
    with pytest.raises(UserError, match="--vocabulary"):
        t5x.load(str(tmp_path / "hf"))
