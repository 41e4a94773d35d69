"""T5X's `utils`: the names that gin files and projects expect, imported from their modules."""

# ruff: noqa: F401, F403

from collections.abc import Callable
from typing import Any

import gin

from t5x import checkpoints
from t5x.checkpoints import get_local_data
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.compat.inference_functions import get_infer_fn
from t5x.compat.run_functions import *
from t5x.data.dataset_config import DatasetConfig
from t5x.gin_utils import run_main
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.datasets import get_dataset, get_training_eval_datasets

# T5X's names in annotations.
EvaluatorConstructor = GetDatasetCallable = GetEvalDatasetCallable = InferFnCallable = Callable[..., Any]
InferStepWithRngCallable = InferStepWithoutRngCallable = InitFnCallable = LearningRateCallable = Callable[..., Any]

# T5X's gin files may use these names without importing their module.
_NAMED = ("CheckpointManagerConstructor", "OrbaxCheckpointManagerInterface", "SaveBestCheckpointer")
for _name in _NAMED:
    gin.external_configurable(getattr(checkpoints, _name), module="t5x.checkpoints")
