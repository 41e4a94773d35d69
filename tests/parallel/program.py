"""Trains one job after another in a group of processes: `program.py JOBS.json PROCESS_INDEX PORT`.

JOBS.json is a list of {"model_dir", "total_steps", "setting"}; all of its settings have the same number of processes.
Of every job's final state, MODEL_DIR/parts.json says into how many parts each parameter is really divided.
"""

import functools
import json
import math
import sys
from pathlib import Path

import jax

from t5x import checkpoints, trainer
from t5x._runtime import startup
from t5x.checkpoints.config import CheckpointConfig, SaveCheckpointConfig
from t5x.data.dataset_config import DatasetConfig
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.optimizers.adafactor import Adafactor
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.partitioning import PjitPartitioner, distributed, multiprocess
from t5x.runs.train import train
from tests.chaos.tasks import VOCABULARY
from tests.parallel.settings import Setting


def network(*, scanned: bool) -> T5Config:
    """A small network that every mesh divides."""
    return T5Config(
        vocab_size=384, emb_dim=32, num_heads=8, head_dim=4, mlp_dim=64, num_encoder_layers=2, num_decoder_layers=1,
        dropout_rate=0.1, scan_layers=scanned,
    )  # fmt: skip


def run(setting: Setting, model_dir: str, total_steps: int) -> None:
    """Trains up to `total_steps` from where `model_dir` stands, and saves there."""
    # Matrices of stacked layers are factored whatever their size; these are too small to be so otherwise.
    optimizer = Adafactor(min_dim_size_to_factor=32)
    model = EncoderDecoderModel(Transformer(network(scanned=setting.scanned)), VOCABULARY, VOCABULARY, optimizer)
    data = DatasetConfig(
        mixture_or_task_name="chaos_dropping", task_feature_lengths={"inputs": 40, "targets": 24}, split="train",
        batch_size=16, shuffle=True, seed=0, pack=True, num_workers=0,
    )  # fmt: skip
    _, state = train(
        model=model,
        train_dataset_cfg=data,
        train_eval_dataset_cfg=None,
        infer_eval_dataset_cfg=None,
        checkpoint_cfg=CheckpointConfig(save=SaveCheckpointConfig()),
        partitioner=PjitPartitioner(preset=setting.preset),
        trainer_cls=functools.partial(
            trainer.Trainer,
            num_microbatches=setting.microbatches,
            learning_rate_fn=create_learning_rate_scheduler("constant", 0.01),
        ),
        model_dir=model_dir,
        total_steps=total_steps,
        eval_period=0,
        stats_period=1,
        summarize_config_fn=None,
    )
    if distributed.is_leader():
        found = {name: _parts(array) for name, array in checkpoints.tree.flatten(state.params).items()}
        (Path(model_dir) / "parts.json").write_text(json.dumps(found))


def _parts(array: jax.Array) -> int:
    return math.prod(array.shape) // math.prod(array.addressable_shards[0].data.shape)


def main() -> None:
    jobs, index, port = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3])
    settings = [Setting(**job["setting"]) for job in jobs]
    (processes,) = {setting.processes for setting in settings}
    startup.configure_logging(debug=False)
    multiprocess.enable_compilation_cache()
    with multiprocess.run(coordinator_address=f"127.0.0.1:{port}", process_count=processes, process_index=index):
        assert jax.device_count() == settings[0].devices, jax.devices()
        for job, setting in zip(jobs, settings, strict=True):
            run(setting, job["model_dir"], job["total_steps"])


if __name__ == "__main__":
    main()
