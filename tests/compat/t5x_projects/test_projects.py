"""Eight small projects, written for T5X: each trains, saves, restores and evaluates."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import checkpoints, data, losses, models
from t5x.examples.t5 import network
from tests.compat.t5x_projects import custom_decode, inference_only, tasks
from tests.support import commands, programs, tiny

HERE = os.path.dirname(__file__)
EVALUATIONS = ("train_eval_dataset_cfg", "infer_eval_dataset_cfg")


def run(capsys, project: str, model_dir, steps: int, *bindings: str) -> dict:
    """Train a project up to a step; return its newest checkpoint."""
    result = commands.run(
        capsys, "train", f"--gin_file={HERE}/{project}.gin", f"--gin.MODEL_DIR='{model_dir}'",
        f"--gin.TRAIN_STEPS={steps}", *bindings,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert checkpoints.latest_step(str(model_dir)) == steps
    return checkpoints.load_t5x_checkpoint(str(model_dir), steps)


def in_two_runs(capsys, project: str, model_dir, *bindings: str) -> tuple[dict, dict]:
    """Train one step, then another one in a run that restores the first, and evaluate."""
    first = run(capsys, project, model_dir, 1, *bindings, *(f"--gin.train.{kind}=None" for kind in EVALUATIONS))
    return first, run(capsys, project, model_dir, 2, *bindings)


def from_checkpoint(capsys, project: str, model_dir, checkpoint: str) -> tuple[dict, dict]:
    """Start from the checkpoint of step 1, train another step and evaluate. Return the checkpoints of both steps."""
    restored = [
        "--gin.utils.CheckpointConfig.restore=@utils.RestoreCheckpointConfig()",
        f"--gin.utils.RestoreCheckpointConfig.path='{checkpoint}'",
    ]
    return checkpoints.load_t5x_checkpoint(checkpoint), run(capsys, project, model_dir, 2, *restored)


def lines(*path) -> list[dict]:
    with open(os.path.join(*map(str, path))) as file:
        return [json.loads(line) for line in file]


def moved(before: dict, after: dict) -> dict[str, bool]:
    flat = checkpoints.tree.flatten
    old, new = flat(before["target"]), flat(after["target"])
    return {name: not np.array_equal(old[name], new[name]) for name in old}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The model directory of a project after one step; its checkpoints start other projects."""
    return tmp_path_factory.mktemp("base")


@pytest.fixture
def checkpoint(base, capsys):
    if checkpoints.latest_step(str(base)) is None:
        run(capsys, "custom_decode", base, 1, "--gin.train.train_eval_dataset_cfg=None")
    return f"{base}/checkpoint_1"


def test_custom_loss(capsys, tmp_path, checkpoint):
    first, second = from_checkpoint(capsys, "custom_loss", tmp_path, checkpoint)
    assert all(moved(first, second).values())
    trained, evaluated = (
        lines(tmp_path, "train", "metrics.jsonl"),
        lines(tmp_path, "training_eval", "project_sums", "metrics.jsonl"),
    )
    assert [record["step"] for record in trained] == [2]
    for record in (*trained, *evaluated):
        assert {"largest_logit", "loss", "z_loss", "accuracy"} <= record.keys()
    # Four validation targets, 2a + 1 for a = 1 … 4, are the bytes + 3 of "3", "5", "7" and "9": 54, 56, 58 and 60.
    assert evaluated[-1]["rare_targets"] == 3
    assert os.path.exists(tmp_path / "inference_eval" / "project_sums-metrics.jsonl")


def test_the_loss_is_that_of_its_definition():
    vocabulary = data.ByteVocabulary()
    from tests.compat.t5x_projects.custom_loss import RarityModel

    config = network.T5Config(
        vocab_size=64, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8, num_encoder_layers=1, num_decoder_layers=1
    )
    model = RarityModel(network.Transformer(config), vocabulary, vocabulary, None, rare=55)
    batch = {
        "encoder_input_tokens": jnp.array([[5, 6, 1]]), "decoder_input_tokens": jnp.array([[0, 52, 58]]),
        "decoder_target_tokens": jnp.array([[52, 58, 1]]), "decoder_loss_weights": jnp.array([[1, 1, 0]]),
    }  # fmt: skip
    shapes = {name: x.shape for name, x in batch.items()}
    params = tiny.random_params_of(model, shapes)
    loss, metrics = jax.jit(model.loss_fn)(params, batch, None)
    log_probs = jax.nn.log_softmax(jax.jit(model._compute_logits)(params, batch))[0]
    np.testing.assert_allclose(loss, -(0.5 * log_probs[0, 52] + log_probs[1, 58]), rtol=1e-5)
    assert float(metrics["rare_targets"].compute()) == 1
    weights = losses.get_loss_normalizing_factor_and_weights(None, batch)[1]
    assert weights is batch["decoder_loss_weights"]


def test_custom_decode_function(checkpoint):
    records = lines(Path(checkpoint).parent, "inference_eval", "project_sums-000001.jsonl")
    assert records and all(record["prediction"].isdigit() for record in records)


@pytest.mark.slow
def test_decode_functions_write_digits(checkpoint):
    state = checkpoints.load_t5x_checkpoint(checkpoint)
    config = network.T5Config(
        vocab_size=384, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1,
        mlp_activations=("gelu", "linear"), dropout_rate=0.0,
    )  # fmt: skip
    batch = {"encoder_input_tokens": np.array([[52, 46, 52, 1], [53, 46, 54, 1]], np.int32)}
    batch |= {"decoder_input_tokens": np.zeros((2, 5), np.int32)}
    decoded = {}
    for decode_fn in (custom_decode.greedy_digits, custom_decode.sample_digits):
        made = tasks.VOCABULARY
        model = models.EncoderDecoderModel(network.Transformer(config), made, made, None, decode_fn=decode_fn)
        ids, aux = jax.jit(model.predict_batch_with_aux)(state["target"], batch)
        decoded[decode_fn] = np.asarray(ids)
        for row in decoded[decode_fn]:
            digits = row[: list(row).index(1)] if 1 in row else np.trim_zeros(row)
            assert len(digits) and ((digits >= custom_decode.FIRST) & (digits <= custom_decode.LAST)).all()
        assert aux["scores"].shape == (2,)
    assert (decoded[custom_decode.sample_digits][:, 3:] == 0).all()  # the state callback ends it after three steps


@pytest.mark.slow
def test_float_inputs(capsys, tmp_path):
    first, second = in_two_runs(capsys, "float_inputs", tmp_path)
    assert all(moved(first, second).values())
    assert second["target"]["project"]["kernel"].shape == (6, 8)
    (record,) = [r for r in lines(tmp_path, "inference_eval", "project_vectors-metrics.jsonl") if r["step"] == 2]
    assert 0 <= record["accuracy"] <= 100


@pytest.mark.slow
def test_prompt_tuning(capsys, tmp_path, checkpoint):
    restored = f"--gin.INITIAL_CHECKPOINT_PATH='{checkpoint}'"
    first, second = in_two_runs(capsys, "prompt_tuning", tmp_path, restored)
    names = moved(first, second)
    assert [name for name, has in names.items() if has] == ["encoder/prompt"]
    base = checkpoints.load_t5x_checkpoint(checkpoint)["target"]
    np.testing.assert_array_equal(base["decoder"]["logits_dense"]["kernel"],
                                  second["target"]["decoder"]["logits_dense"]["kernel"])  # fmt: skip
    assert checkpoints.tree.flatten(second["state"]["param_states"]).keys() == {
        f"encoder/prompt/{slot}" for slot in ("m", "v", "v_row", "v_col")
    }


@pytest.mark.slow
def test_dual_encoder(capsys, tmp_path):
    first, second = in_two_runs(capsys, "dual_encoder", tmp_path)
    assert all(moved(first, second).values())
    trained = lines(tmp_path, "train", "metrics.jsonl")
    assert all({"loss", "recall_at_1", "timing/steps_per_second"} <= record.keys() for record in trained)
    (record,) = [r for r in lines(tmp_path, "inference_eval", "project_pairs-metrics.jsonl") if r["step"] == 2]
    assert -10 <= record["mean_score"] <= 10  # cosines over a temperature of 0.1


@pytest.mark.slow
def test_custom_trainer(capsys, tmp_path, checkpoint):
    first, second = from_checkpoint(capsys, "custom_trainer", tmp_path, checkpoint)
    record = lines(tmp_path, "train", "metrics.jsonl")[-1]
    flat = checkpoints.tree.flatten
    pairs = zip(flat(first["target"]).values(), flat(second["target"]).values(), strict=True)
    squares = [np.sum((a - b) ** 2) for a, b in pairs]
    np.testing.assert_allclose(record["moved"], np.sqrt(sum(squares)), rtol=1e-4)
    np.testing.assert_allclose(record["learning_rate"], 0.01, rtol=1e-6)


@pytest.mark.slow
def test_custom_partitioning(capsys, tmp_path):
    first, second = in_two_runs(capsys, "custom_partitioning", tmp_path)
    assert moved(first, second)["adapter_down"]
    with open(tmp_path / "model-info.txt") as file:
        table = file.read()
    assert "adapter_down" in table and "adapter=4" in table


def test_inference_only(checkpoint):
    lengths = {"inputs": 8, "targets": 4}
    examples = [{"inputs": [*tasks.VOCABULARY.encode(f"{a}+1"), 1], "targets": [*tasks.VOCABULARY.encode("7"), 1]}
                for a in range(6)]  # fmt: skip
    texts, scores = inference_only.predict(
        checkpoint, tasks.VOCABULARY, data.EncDecFeatureConverter(pack=False), examples, lengths
    )
    assert sorted(texts) == sorted(scores) == list(range(6)) and all(isinstance(text, str) for text in texts.values())
    assert all(score < 0 for score in scores.values()) and len(set(scores.values())) > 1


@pytest.mark.slow
def test_a_feature_converter_of_the_real_seqio():
    program = Path(HERE) / "programs" / "seqio_converter.py"
    found = json.loads(programs.reference_answers(program, [], "seqio_converter.json").read_text())
    assert found["same"] and found["empty"] and found["dtype"] == "float32" and found["shape"] == [5, 3]
    # The rows that seqio packs; see its documentation of EncDecFeatureConverter.
    assert found["packed"]["encoder_input_tokens"] == [7, 8, 5, 1, 8, 4, 9, 3, 1, 0]
    assert found["packed"]["encoder_segment_ids"] == [1, 1, 1, 1, 2, 2, 2, 2, 2, 0]
    assert found["packed"]["decoder_input_tokens"] == [0, 3, 9, 0, 4, 0, 0]
    # Bytes are shifted by the three special ids; 1 is EOS.
    assert found["of_text"]["encoder_input_tokens"] == [[100, 48, 101, 1, 0], [100, 101, 102, 103, 104]]
    assert found["of_text"]["decoder_input_tokens"] == [[0, 102, 1, 0], [0, 198, 191, 1]]
    assert found["of_text"]["texts"] == ["c", "ü"]
    assert found["of_targets"] == ["targets", "inputs"]
