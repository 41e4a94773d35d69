"""Checkpoints: written asynchronously and atomically, verified on read, restored onto any mesh."""

from t5x.checkpoints import tree
from t5x.checkpoints.best import Ranking, SaveBestCheckpointer
from t5x.checkpoints.checkpoint_reader import read_names, read_shapes, restore
from t5x.checkpoints.config import Checkpointer, CheckpointManagerConstructor, OrbaxCheckpointManagerInterface
from t5x.checkpoints.manifest import DamagedCheckpoint, verify
from t5x.checkpoints.manifest import read_file as read_sidecar
from t5x.checkpoints.model_dir_lock import ModelDirLock
from t5x.checkpoints.paths import DATASET_STATE, local_path, location, make_directory
from t5x.checkpoints.store import CheckpointStore

__all__ = [
    "DATASET_STATE",
    "CheckpointManagerConstructor",
    "CheckpointStore",
    "Checkpointer",
    "DamagedCheckpoint",
    "ModelDirLock",
    "OrbaxCheckpointManagerInterface",
    "Ranking",
    "SaveBestCheckpointer",
    "local_path",
    "location",
    "make_directory",
    "read_names",
    "read_shapes",
    "read_sidecar",
    "restore",
    "tree",
    "verify",
]
