"""A decoder-only model from gin to predictions, as a user runs it."""

import json

from t5x.cli.inspect_verb import inspect
from tests.support.programs import losses

GIN = """
from __gin__ import dynamic_registration

import __main__ as train_script
import seqio
from t5x import adafactor
from t5x import models
from t5x.examples.decoder_only import network as decoder_network

include 't5x/examples/demo/dates.gin'
include 't5x/examples/demo/model.gin'

train_script.train.model = @models.DecoderOnlyModel()
train_script.train.eval_steps = 1
models.DecoderOnlyModel:
  module = @decoder_network.DecoderWrapper()
  vocabulary = @seqio.ByteVocabulary()
  optimizer_def = @adafactor.Adafactor()
  inputs_bidirectional_attention = True
decoder_network.DecoderWrapper.config = @decoder_network.TransformerConfig()
decoder_network.TransformerConfig:
  vocab_size = 384
  emb_dim = 16
  num_heads = 2
  num_layers = 1
  head_dim = 8
  mlp_dim = 32
  mlp_activations = ('gelu', 'linear')
  dropout_rate = 0.0
  logits_via_embedding = True
"""


def test_a_prefix_lm_trains_evaluates_resumes_and_infers(tmp_path, run_here):
    (tmp_path / "prefix_lm.gin").write_text(GIN)
    run = tmp_path / "run"
    train = [
        "train", f"--gin_file={tmp_path / 'prefix_lm.gin'}", f"--gin.MODEL_DIR={run}",
        "--gin.BATCH_SIZE=8", "--gin.train.stats_period=1", "--gin.seqio.Evaluator.num_examples=8",
    ]  # fmt: skip
    evaluations = ("train_eval_dataset_cfg", "infer_eval_dataset_cfg")
    first = run_here(*train, "--gin.TRAIN_STEPS=2", *(f"--gin.train.{kind}=None" for kind in evaluations))
    assert first.code == 0, first.err
    again = run_here(*train, "--gin.TRAIN_STEPS=4")
    assert again.code == 0 and "resuming from" in again.err, again.err
    assert len(losses(run)) == 4
    assert "teacher forcing: loss" in again.err

    report = inspect(str(run), as_json=True)
    assert report["model"] == "decoder-only T5 of its own size"
    assert report["config"]["num_layers"] == 1
    text = '{"inputs": "3 March 1997", "targets": "1997-03-03"}\n'
    for options in (["--mode=predict", "--max_length=8"], ["--mode=score"]):
        done = run_here("infer", "--model", run, "--input", "-", *options, text=text)
        assert done.code == 0, done.err
        assert json.loads(done.out)["score"] < 0
    run_here("convert", run, tmp_path / "hf", "--to", "hf").refused("decoder")
    to_native = run_here("convert", run, tmp_path / "native", "--to", "native")
    assert to_native.code == 0, to_native.err
    assert inspect(str(tmp_path / "native"), as_json=True)["params_sha256"] == report["params_sha256"]
