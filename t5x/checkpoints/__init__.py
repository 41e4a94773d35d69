"""Checkpoints: written asynchronously and atomically, verified on read, restored onto any mesh."""

# ruff: noqa: F401

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
from t5x.checkpoints.t5x_api import *  # noqa: F403
