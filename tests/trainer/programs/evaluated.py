"""One of two processes of a run whose evaluations never end: `evaluated.py MODEL_DIR PROCESS_INDEX PORT`.

MODEL_DIR/evaluating exists when the first has begun.
"""

import functools
import itertools
import sys
from pathlib import Path

from t5x import trainer
from t5x._runtime import startup
from t5x._runtime.errors import UserError
from t5x.checkpoints.config import CheckpointConfig, SaveCheckpointConfig
from t5x.data.dataset_config import DatasetConfig
from t5x.data.loader import train_loader
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner, multiprocess
from t5x.runs.train import train
from t5x.trainer.datasets import ShardInfo
from tests.chaos.tasks import VOCABULARY


class Batches:
    """The first batches of the training data, again and again."""

    def __init__(self, cfg: DatasetConfig, rows: range, converter, note: Path):
        with train_loader(cfg, feature_converter=converter(pack=cfg.pack), rows=rows) as loader:
            self._batches = [next(loader) for _ in range(2)]
        self._note, self._asked = note, 0

    def __iter__(self):
        self._asked += 1
        if self._asked > 1:  # the first time, a run only looks whether there are any
            self._note.touch()
        return itertools.cycle(self._batches)


def run(model_dir: Path) -> None:
    network = T5Config(
        vocab_size=384, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8, num_encoder_layers=1, num_decoder_layers=1,
        dropout_rate=0.0,
    )  # fmt: skip
    data = DatasetConfig(
        mixture_or_task_name="chaos_dropping", task_feature_lengths={"inputs": 40, "targets": 24}, split="train",
        batch_size=4, shuffle=True, seed=0, pack=True, num_workers=0,
    )  # fmt: skip

    def get_datasets(cfg, shard_id, num_shards, eval_steps, feature_converter_cls, **_):
        rows = ShardInfo(shard_id, num_shards).rows(cfg.batch_size)
        return {"held_out": Batches(cfg, rows, feature_converter_cls, model_dir / "evaluating")}

    train(
        model=EncoderDecoderModel(Transformer(network), VOCABULARY, VOCABULARY, Adafactor()),
        train_dataset_cfg=data,
        train_eval_dataset_cfg=data,
        train_eval_get_dataset_fn=get_datasets,
        infer_eval_dataset_cfg=None,
        checkpoint_cfg=CheckpointConfig(save=SaveCheckpointConfig()),
        partitioner=PjitPartitioner(num_partitions=1),
        trainer_cls=functools.partial(trainer.Trainer, learning_rate_fn=lambda step: 0.01),
        model_dir=str(model_dir),
        total_steps=2,
        eval_period=1,
        stats_period=1,
        summarize_config_fn=None,
    )


def main() -> None:
    model_dir, index, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    startup.configure_logging(debug=False)
    multiprocess.enable_compilation_cache()
    with multiprocess.run(coordinator_address=f"127.0.0.1:{port}", process_count=2, process_index=index):
        run(model_dir)


if __name__ == "__main__":
    try:
        main()
    except (trainer.Stopped, UserError) as error:
        print(error, file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
