"""Checkpoints: written asynchronously and atomically, verified on read, restored onto any mesh."""

from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from t5x.checkpoints import tree
from t5x.checkpoints.array_reader import read_names, read_shapes, restore
from t5x.checkpoints.best import Ranking
from t5x.checkpoints.formats.source import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from t5x.checkpoints.manifest import DamagedCheckpoint, verify
from t5x.checkpoints.manifest import read_file as read_sidecar
from t5x.checkpoints.model_dir_lock import ModelDirLock
from t5x.checkpoints.paths import DATASET_STATE, local_path, location, make_directory
from t5x.checkpoints.store import CheckpointStore
from t5x.checkpoints.t5x_api import (
    Checkpointer,
    CheckpointerConstructor,
    CheckpointManagerConstructor,
    DatasetArgs,
    DatasetCheckpointHandler,
    OrbaxCheckpointManagerInterface,
    RestoreStateTransformationFn,
    SaveBestCheckpointer,
    SaveStateTransformationFn,
    all_dataset_checkpoint_steps,
    all_steps,
    fake_param_info,
    find_checkpoint,
    get_checkpoint_dir,
    get_checkpoint_prefix,
    get_local_data,
    get_step_from_checkpoint_dir,
    latest_step,
    load_t5x_checkpoint,
    populate_metrics_for_steps,
    register_ts_spec_for_serialization,
)

__all__ = [
    "DATASET_STATE",
    "CheckpointManagerConstructor",
    "CheckpointStore",
    "Checkpointer",
    "CheckpointerConstructor",
    "DamagedCheckpoint",
    "DatasetArgs",
    "DatasetCheckpointHandler",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "ModelDirLock",
    "OrbaxCheckpointManagerInterface",
    "PartitionSpec",
    "PyTreeDef",
    "Ranking",
    "RestoreStateTransformationFn",
    "SaveBestCheckpointer",
    "SaveStateTransformationFn",
    "all_dataset_checkpoint_steps",
    "all_steps",
    "fake_param_info",
    "find_checkpoint",
    "get_checkpoint_dir",
    "get_checkpoint_prefix",
    "get_local_data",
    "get_step_from_checkpoint_dir",
    "latest_step",
    "load_t5x_checkpoint",
    "local_path",
    "location",
    "make_directory",
    "populate_metrics_for_steps",
    "read_names",
    "read_shapes",
    "read_sidecar",
    "register_ts_spec_for_serialization",
    "restore",
    "tree",
    "verify",
]
