"""A packed mixture of real data sets."""

import json

import numpy as np
import pytest

from t5x import data
from tests.support.paths import REPO, SHARED
from tests.support.programs import losses, t5x

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")


TASKS = REPO / "tests/data/real_tasks.py"
LENGTHS = {"inputs": 128, "targets": 64}


@pytest.mark.slow
def test_batches_are_full_and_the_same_after_a_restart_with_workers(monkeypatch, registries):
    monkeypatch.setenv("REAL_DATA", str(SHARED))

    def loader(workers):
        cfg = data.DatasetConfig("all_real", LENGTHS, "train", 8, shuffle=True, seed=0, pack=True, module=str(TASKS),
                                 num_workers=workers)  # fmt: skip
        return data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter(pack=True))

    with loader(0) as whole, loader(2) as halves:
        next(whole)
        halves.restore(whole.state())
        for _ in range(3):
            batch, other = next(whole), next(halves)
            for name, ids in batch.items():
                np.testing.assert_array_equal(ids, other[name])
            assert (batch["encoder_input_tokens"] != 0).mean() > 0.75, "packing fills the rows"


@pytest.mark.slow
def test_a_packed_mixture_of_translation_span_corruption_and_questions(tmp_path):
    """And killed half-way by its number of steps: the second half has the losses of an undisturbed run."""

    def train(model_dir, steps, workers):
        return t5x(
            "train", "--gin_file=t5x/examples/t5/t5_1_1/tiny.gin", "--gin_file=t5x/configs/runs/pretrain.gin",
            "--gin.MIXTURE_OR_TASK_NAME=all_real", f"--gin.MIXTURE_OR_TASK_MODULE={TASKS}",
            f"--gin.MODEL_DIR={model_dir}", f"--gin.TRAIN_STEPS={steps}", "--gin.DROPOUT_RATE=0.1",
            "--gin.BATCH_SIZE=8", "--gin.network.T5Config.num_encoder_layers=1",
            "--gin.network.T5Config.num_decoder_layers=1",
            f"--gin.TASK_FEATURE_LENGTHS={LENGTHS}", "--gin.train.stats_period=1",
            "--gin.train.train_eval_dataset_cfg=None", "--gin.train/utils.DatasetConfig.pack=True",
            f"--gin.train/utils.DatasetConfig.num_workers={workers}", "--gin.network.T5Config.dtype=float32",
            f"--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file={SHARED / 't5_vocab/spiece.model'}",
            "--gin.seqio.SentencePieceVocabulary.extra_ids=100", cwd=REPO, env={"REAL_DATA": str(SHARED)},
        )  # fmt: skip

    whole = train(tmp_path / "whole", 4, workers=0)
    assert whole.returncode == 0, whole.stderr
    assert "mixture all_real: multi30k_ende 33.3 %, wikitext2_span_corruption 33.3 %, squad 33.3 %" in whole.stderr
    first = train(tmp_path / "halves", 2, workers=2)
    second = train(tmp_path / "halves", 4, workers=0)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    lines = (tmp_path / "whole" / "train" / "metrics.jsonl").read_text().splitlines()
    filled = [json.loads(line)["non_padding_fraction/encoder_input_tokens"] for line in lines]
    assert min(filled) > 0.75, "packing fills the rows"
