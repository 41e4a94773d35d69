"""A ranker is trained on lists, measured by its rankings, and stopped by them."""

import functools
import json
import re

import pytest

import t5x
from t5x import data, trainer
from t5x._runtime.errors import UserError
from t5x.apps.ranking import tasks
from t5x.apps.ranking.models import RankingModel
from t5x.apps.ranking.templates import Template
from t5x.checkpoints.config import CheckpointConfig, SaveCheckpointConfig
from t5x.data.dataset_config import DatasetConfig
from t5x.network import T5Config, Transformer
from t5x.optimizers.adafactor import Adafactor
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.partitioning import PjitPartitioner
from t5x.runs.train import train

VOCABULARY = data.ByteVocabulary()
TEMPLATE = Template(text="{query} {document} :", relevant="1", irrelevant="0", max_length=16)
CONFIG = T5Config(
    vocab_size=384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=1, num_decoder_layers=1,
    dropout_rate=0.0,
)  # fmt: skip


@pytest.fixture
def judged(tmp_path) -> str:
    """Passages with an x are relevant, whatever the query."""
    lines = [
        {"query": f"q{q}", "passage": f"{'bcdfgh'[i]}{'x' if i % 3 == q % 3 else 'o'}{q}", "label": int(i % 3 == q % 3)}
        for q in range(30)
        for i in range(6)
    ]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield str(tmp_path / "judged.jsonl")
    for name in ("pairs", "lists"):
        data.TaskRegistry.remove(name)


def run(model_dir, judged, *, total_steps=120, template=TEMPLATE):
    make = {"judged": {"train": judged}, "vocabulary": VOCABULARY, "template": template, "held_out": 0.3}
    config = functools.partial(DatasetConfig, batch_size=8, seed=0, num_workers=0)
    return train(
        model=RankingModel(
            Transformer(CONFIG), VOCABULARY, VOCABULARY, Adafactor(), template=template, loss="listwise",
            loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
        ),
        train_dataset_cfg=config(
            tasks.lists(**make), {"inputs": 16, "targets": 4, "grades": 4}, split="train", shuffle=True
        ),
        train_eval_dataset_cfg=None,
        infer_eval_dataset_cfg=config(
            tasks.pairs(**make), {"inputs": 16, "targets": 2}, split="validation", shuffle=False
        ),
        checkpoint_cfg=CheckpointConfig(save=SaveCheckpointConfig()),
        partitioner=PjitPartitioner(),
        trainer_cls=functools.partial(
            trainer.Trainer, num_microbatches=2, learning_rate_fn=create_learning_rate_scheduler("constant", 0.03)
        ),
        model_dir=str(model_dir),
        total_steps=total_steps,
        eval_period=20,
        run_eval_before_training=True,
        actions={"INFER_EVAL": [trainer.EarlyStoppingAction(("pairs", "ndcg@10"), "max", patience=2)]},
        inference_evaluator_cls=functools.partial(data.Evaluator, logger_cls=[data.JSONLogger]),
        summarize_config_fn=None,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_is_stopped_by_the_ranking_of_held_out_queries(tmp_path, judged, caplog):
    caplog.set_level("INFO", logger="t5x")
    step, _ = run(tmp_path / "run", judged)
    written = (tmp_path / "run" / "inference_eval" / "pairs-metrics.jsonl").read_text().splitlines()
    measured = {line["step"]: line["ndcg@10"] for line in map(json.loads, written)}
    assert measured[0] < 0.9 and measured[step] == pytest.approx(1.0)
    assert 20 < step < 120 and re.search(r"EarlyStoppingAction\(pairs, ndcg@10, max\) ends the run", caplog.text)

    loaded = t5x.load(str(tmp_path / "run"))
    assert Template(**loaded.source.template) == TEMPLATE
    ranked = loaded.rank("q77", ["co77", "bx77"])
    assert [passage.index for passage in ranked] == [1, 0]

    other = Template(text="{document} {query} :", relevant="1", irrelevant="0", max_length=16)
    for name in ("pairs", "lists"):
        data.TaskRegistry.remove(name)
    with pytest.raises(UserError, match="checkpoint of another model"):
        run(tmp_path / "run", judged, total_steps=200, template=other)
