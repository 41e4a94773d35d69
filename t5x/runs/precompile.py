"""Compile a training step and write its HLO: `t5x precompile`, or `python t5x/main.py --run_mode=precompile`."""

import io
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.dataset_config import DatasetConfig
from t5x.files.directory import make_directory
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner, distributed
from t5x.telemetry import jsonl
from t5x.trainer.abstract_run import abstract_batch, abstract_trainer
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.datasets import get_dataset, input_spec
from t5x.trainer.state_layout import StateLayout

log = logging.getLogger(__name__)

_LEARNING_RATE = 1e-3  # a constant, as in T5X: the trainer's schedule is not part of this configuration


def precompile(
    *,
    model: BaseTransformerModel,
    train_dataset_cfg: DatasetConfig,
    partitioner: PjitPartitioner,
    model_dir: str,
    random_seed: int | None,
    get_dataset_fn: Callable[..., Iterable[Any]] = get_dataset,
    verify_matching_vocabs_fn: Callable[[DatasetConfig, BaseTransformerModel], None] | None = verify_matching_vocabs,
) -> None:
    """Compile one training step for the mesh, without parameters, and write three files to `model_dir`.

    `lowered_hlo_pre_optimization` and `lowered_hlo_post_optimization` are HLO text; `assignment` is a NumPy file of the
    mesh's device ids. One batch is read for its shapes; without the data, they follow from the lengths if the feature
    converter is of this package.

    Args:
      model: the model to train.
      train_dataset_cfg: training data.
      partitioner: the mesh.
      model_dir: directory or URL of the files.
      random_seed: seed of dropout; None is 0.
      get_dataset_fn: creates the batches; see `t5x.trainer.datasets`.
      verify_matching_vocabs_fn: checks the vocabularies of data and model; None skips the check.
    """
    if verify_matching_vocabs_fn is not None:
        verify_matching_vocabs_fn(train_dataset_cfg, model)
    model_dir = make_directory(model_dir, "MODEL_DIR")
    cfg, converter_cls = train_dataset_cfg, model.FEATURE_CONVERTER_CLS
    batch = abstract_batch(cfg, model, lambda: get_dataset_fn(cfg, 0, 1, converter_cls))
    if batch is None:
        raise UserError(
            "The shapes of a batch are unknown, because the data cannot be read. Use a local copy of the data, or set "
            "TASK_FEATURE_LENGTHS and a feature converter of t5x."
        )
    shapes, types = input_spec(model, cfg.task_feature_lengths, lambda: batch)
    layout = StateLayout.of(model, partitioner, shapes, types)
    rng = jax.random.key(random_seed or 0)
    trainer = abstract_trainer(layout, rng=rng, learning_rate_fn=lambda step: _LEARNING_RATE)
    began = time.perf_counter()
    train_step = trainer._partitioned_train_step
    assert isinstance(train_step, jax.stages.Wrapped)
    lowered = train_step.lower(layout.abstract, batch)
    compiled = lowered.compile()
    log.info("compiled the train step in %.1f s", time.perf_counter() - began)
    if distributed.is_leader():
        assignment = io.BytesIO()
        np.save(assignment, np.vectorize(lambda device: device.id)(partitioner.mesh.devices))
        files = {
            "lowered_hlo_pre_optimization": lowered.as_text(dialect="hlo").encode(),
            "lowered_hlo_post_optimization": (compiled.as_text() or "").encode(),
            "assignment": assignment.getvalue(),
        }
        for name, content in files.items():
            jsonl.replace(os.path.join(model_dir, name), [content])
            log.info("wrote %s", os.path.join(model_dir, name))
