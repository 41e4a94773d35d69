"""Whole runs from T5X's own tiny checkpoint: with its optimizer state, and with a module under another name."""

import json

import jax
import numpy as np
import pytest
from flax import serialization

from t5x import data
from t5x._runtime.errors import UserError
from t5x.checkpoints import tree
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.transfer import config_of
from t5x.data.dataset_config import DatasetConfig
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.partitioning import PjitPartitioner
from t5x.runs.eval import evaluate
from t5x.trainer import StateLayout
from t5x.trainer.restore import restore_state
from t5x.trainer.trainer import summarize
from tests.support import tiny
from tests.support.paths import SHARED
from tests.support.programs import losses

FIXTURE = SHARED / "t5x_testdata" / "test_t5_tiny.checkpoint_0"
pytestmark = pytest.mark.skipif(not FIXTURE.is_file(), reason="the folder ../shared/data is not there")

# The contents of the fixture as its makers published it.
SUMS = {
    "target/token_embedder/embedding": 370.769353,
    "target/encoder/layers_0/attention/query/kernel": 1.087411,
    "target/decoder/logits_dense/kernel": 87.752480,
    "target/encoder/relpos_bias/rel_embedding": -2.028106,
}
SIZES = {
    "emb_dim": 8, "num_heads": 4, "head_dim": 3, "mlp_dim": 16, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "vocab_size": 32128, "mlp_activations": "('gelu', 'linear')", "logits_via_embedding": False, "dropout_rate": 0.0,
}  # fmt: skip


@pytest.mark.slow
def test_the_native_fixture_trains_on_with_its_optimizer_state(caplog):
    caplog.set_level("INFO")
    source = open_checkpoint(FIXTURE)
    model = tiny.model(T5Config(**config_of(source), dropout_rate=0.0))
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    cfg = RestoreCheckpointConfig(path=str(FIXTURE), mode="specific", optimizer_state="keep")
    state = restore_state(source, cfg, model, layout, jax.random.key(0))
    found = tree.flatten(state.state_dict())
    assert {name: np.sum(np.asarray(found[name]), dtype=np.float64) for name in SUMS} == pytest.approx(SUMS, abs=2e-4)
    assert "step: 0; optimizer state: kept" in caplog.text
    stored = source.arrays["state/param_states/token_embedder/embedding/v"]
    assert found["state/param_states/token_embedder/embedding/v"].shape == stored.shape == (32128, 8)

    trainer = tiny.trainer(layout, state, jax.random.key(1), learning_rate_fn=lambda step: 0.01)
    batch = tiny.batch(vocab=32128)
    before = summarize([trainer.measure(batch)])["loss"]
    for _ in range(2):
        trainer.step(batch)
    assert int(trainer.train_state.step) == 2 and summarize([trainer.measure(batch)])["loss"] < before
    assert float(trainer.train_state.param_states["token_embedder"]["embedding"].v.sum()) > 0


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """The fixture with its output layer under another name, optimizer state included, written by Flax."""
    content = serialization.msgpack_restore(FIXTURE.read_bytes())
    for part in (content["optimizer"]["target"], content["optimizer"]["state"]["param_states"]):
        part["decoder"]["lm_head"] = part["decoder"].pop("logits_dense")
    directory = tmp_path_factory.mktemp("renamed") / "checkpoint_0"
    directory.mkdir()
    (directory / "checkpoint").write_bytes(serialization.msgpack_serialize(content))
    return directory


@pytest.mark.slow
def test_a_run_from_a_checkpoint_with_a_renamed_module_keeps_its_best(renamed, tmp_path, run_here):
    run = tmp_path / "run"
    arguments = [
        "train", "--gin_file=t5x/examples/demo/dates.gin", f"--gin.MODEL_DIR={run}", "--gin.BATCH_SIZE=8",
        *(f"--gin.network.T5Config.{name}={value}" for name, value in SIZES.items()),
        "--gin.train.stats_period=1", "--gin.train.eval_period=1", "--gin.train.infer_eval_dataset_cfg=None",
        "--gin.train.eval_steps=1", "--gin.utils.SaveCheckpointConfig.period=1",
        "--gin.utils.SaveCheckpointConfig.keep=1",
        '--gin.utils.SaveCheckpointConfig.best_metric="training_eval/dates/loss"',
        '--gin.utils.SaveCheckpointConfig.best_mode="max"',  # so that it is the first, and not the newest
        "--gin.utils.CheckpointConfig.restore=@utils.RestoreCheckpointConfig()",
        f"--gin.utils.RestoreCheckpointConfig.path={renamed}",
        r"--gin.utils.RestoreCheckpointConfig.assignment_map=[('decoder/logits_dense/(.*)', r'decoder/lm_head/\1')]",
    ]  # fmt: skip
    first = run_here(*arguments, "--gin.TRAIN_STEPS=2")
    assert first.code == 0, first.err
    assert "target/decoder/logits_dense/kernel <- target/decoder/lm_head/kernel" in first.err
    assert "optimizer state: kept" in first.err
    assert "best checkpoint by training_eval/dates/loss: step 1" in first.err

    again = run_here(*arguments, "--gin.TRAIN_STEPS=4")  # resumed: the map is for the initial checkpoint
    assert again.code == 0, again.err
    assert f"resuming from {run / 'checkpoint_2'}" in again.err
    found = losses(run)
    assert sorted(found) == [1, 2, 3, 4]
    lines = (run / "training_eval" / "dates" / "metrics.jsonl").read_text().splitlines()
    held_out = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    best = max(held_out, key=held_out.get)
    record = json.loads((run / "best.json").read_text())
    assert (record["step"], record["value"]) == (best, held_out[best])
    assert {path.name for path in run.glob("checkpoint_*")} == {f"checkpoint_{best}", "checkpoint_4"}


@pytest.mark.slow
def test_evaluation_takes_native_checkpoints_and_lists_of_them(renamed, tmp_path):
    vocabulary = data.ByteVocabulary()
    task = data.Task(
        "sums", source=data.FunctionDataSource(lambda split: [{"inputs": "1 + 1", "targets": "2"}], splits=("test",)),
        preprocessors=[data.preprocessors.tokenize, data.preprocessors.append_eos],
        output_features={"inputs": data.Feature(vocabulary), "targets": data.Feature(vocabulary)},
        metric_fns=[lambda targets, scores: {"score": np.mean(scores)}],
    )  # fmt: skip
    module = Transformer(T5Config(**config_of(open_checkpoint(FIXTURE))))

    def run(path, output="out", **rules):
        return evaluate(
            model=EncoderDecoderModel(module, vocabulary, vocabulary, None), partitioner=PjitPartitioner(),
            dataset_cfg=DatasetConfig(task, {"inputs": 8, "targets": 8}, "test", 1, shuffle=False, seed=0),
            restore_checkpoint_cfg=RestoreCheckpointConfig(path=path, **rules), output_dir=str(tmp_path / output),
            summarize_config_fn=None,
        )  # fmt: skip

    plain = run([str(FIXTURE)], mode="specific")
    assert plain[0]["sums"]["score"] < 0
    rule = [("decoder/logits_dense/kernel", "decoder/lm_head/kernel")]
    assert run(str(renamed.parent), mode="all", assignment_map=rule) == plain
    assert run(str(renamed.parent), mode="all", assignment_map=rule) == {}  # noted as done
    with pytest.raises(UserError, match=r"step 0.*EVAL_OUTPUT_DIR"):
        run([str(FIXTURE), str(renamed)], "other")
