"""T5X's `utils`: the names that gin files and projects expect, imported from their modules."""

# ruff: noqa: F401

from collections.abc import Callable
from typing import Any

import gin

from t5x import checkpoints
from t5x.checkpoints import get_local_data
from t5x.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.compat.inference_functions import get_infer_fn
from t5x.compat.run_functions import (
    LegacyCheckpointer,
    LegacyCheckpointManager,
    ShardedDatasetIterator,
    TrainStateInitializer,
    create_checkpoint_manager_and_restore,
    create_orbax_checkpoint_manager,
    find_first_checkpoint_step,
    find_next_checkpoint_step,
    flatten_dict_string_keys,
    get_dataset_inner,
    get_fallback_state,
    get_first_valid_restore_config_and_paths,
    get_vocabulary,
    get_zeros_batch_like_dataset,
    get_zeros_batch_like_spec,
    import_module,
    log_model_info,
    multihost_assert_equal,
    override_params_axes_names,
    prepare_train_iter,
    restore,
    round_vocab_size_to_multiple,
    set_hardware_rng_ops,
    sync_global_devices,
)
from t5x.data.dataset_config import DatasetConfig
from t5x.gin_utils import run_main
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.datasets import get_dataset, get_training_eval_datasets

# T5X's names in annotations.
EvaluatorConstructor = GetDatasetCallable = GetEvalDatasetCallable = InferFnCallable = Callable[..., Any]
InferStepWithRngCallable = InferStepWithoutRngCallable = InitFnCallable = LearningRateCallable = Callable[..., Any]

# T5X's gin files may use these names without importing their module.
for _class in (
    checkpoints.CheckpointManagerConstructor,
    checkpoints.OrbaxCheckpointManagerInterface,
    checkpoints.SaveBestCheckpointer,
):
    gin.external_configurable(_class, module="t5x.checkpoints")
