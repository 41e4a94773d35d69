"""T5X's `utils`: the names that gin files expect, imported from their modules."""

import gin

from t5x import checkpoints
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.data.dataset_config import DatasetConfig
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.datasets import get_dataset, get_training_eval_datasets
from t5x.trainer.state import StateLayout

TrainStateInitializer = StateLayout

__all__ = [
    "CheckpointConfig",
    "DatasetConfig",
    "RestoreCheckpointConfig",
    "SaveCheckpointConfig",
    "TrainStateInitializer",
    "create_learning_rate_scheduler",
    "get_dataset",
    "get_training_eval_datasets",
    "verify_matching_vocabs",
]

# T5X's gin files may use these names without importing their module.
for _class in (
    checkpoints.CheckpointManagerConstructor,
    checkpoints.OrbaxCheckpointManagerInterface,
    checkpoints.SaveBestCheckpointer,
):
    gin.external_configurable(_class, module="t5x.checkpoints")
