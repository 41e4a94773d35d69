"""The data of a run under T5X's names; users can replace these functions by their own.

`train.get_dataset_fn` and `train.train_eval_get_dataset_fn` receive the part of every batch that this process reads
and return batches, {feature: array [rows of this process, length]}.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.dataset_config import DatasetConfig
from t5x.data.feature_converters import FeatureConverter
from t5x.data.loader import Batch, TrainLoader, eval_batches, train_loader
from t5x.data.seqio_converters import make_converter, shapes_and_types
from t5x.data.tasks import tasks_with_split
from t5x.models import BaseModel, BaseTransformerModel

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """The rows of every global batch that a process reads: shard `index` of `num_shards` equal ones."""

    index: int = 0
    num_shards: int = 1

    def rows(self, batch_size: int) -> range:
        count = batch_size // self.num_shards
        return range(self.index * count, (self.index + 1) * count)


def get_dataset(
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: Callable[..., Any],
    num_epochs: int | None = None,
    continue_from_last_checkpoint: bool = True,
) -> TrainLoader:
    """Return the endless batches of a training run.

    Args:
      shard_id, num_shards: which of equal parts of every batch to read.
      num_epochs: must be None; the number of steps ends a run.
      continue_from_last_checkpoint: must be True; every checkpoint includes the position in the data.
    """
    if num_epochs is not None or not continue_from_last_checkpoint:
        raise UserError(
            "utils.get_dataset: num_epochs must be None and continue_from_last_checkpoint True. Training repeats the "
            "data, resumes at the position in the checkpoint, and ends after TRAIN_STEPS."
        )
    converter = make_converter(feature_converter_cls, cfg.pack)
    return train_loader(cfg, feature_converter=converter, rows=ShardInfo(shard_id, num_shards).rows(cfg.batch_size))


@dataclasses.dataclass(frozen=True)
class EvaluationBatches(Iterable[Batch]):
    """The batches of one task. Every iteration yields every example once."""

    cfg: DatasetConfig
    converter: FeatureConverter
    rows: range
    limit: int | None

    def __iter__(self) -> Iterator[Batch]:
        batches = eval_batches(self.cfg, feature_converter=self.converter, rows=self.rows)
        return (batch.batch for batch in itertools.islice(batches, self.limit))


def get_training_eval_datasets(
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    eval_steps: int | None,
    feature_converter_cls: Callable[..., Any],
    deterministic: bool = True,
    model_dir: str | None = None,
    start_step: int = 0,
) -> dict[str, EvaluationBatches]:
    """Return {task: batches} for teacher-forced evaluation. Tasks without the split are skipped.

    Args:
      eval_steps: maximum number of batches per task; None is unlimited.
      deterministic, model_dir, start_step: accepted for compatibility with T5X; evaluation is always deterministic.
    """
    rows = ShardInfo(shard_id, num_shards).rows(cfg.batch_size)
    converter = make_converter(feature_converter_cls, pack=False)
    return {
        task.name: EvaluationBatches(
            dataclasses.replace(cfg, mixture_or_task_name=task, module=None), converter, rows, eval_steps
        )
        for task in tasks_with_split(cfg.mixture_or_task(), cfg.split, "train_eval")
    }


def input_spec(
    model: BaseModel, task_feature_lengths: Mapping[str, int] | None, peek: Callable[[], Mapping[str, Any]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any] | None]:
    """Return the shapes and dtypes for `model.get_initial_variables`.

    Models of this package need only the lengths. Others get those of every feature of a batch, as in T5X.

    Args:
      peek: returns a batch.
    """
    own = getattr(type(model), "get_initial_variables", None) is BaseTransformerModel.get_initial_variables
    converter = getattr(model.FEATURE_CONVERTER_CLS, "__module__", "")
    if own and hasattr(model, "input_shapes") and converter.startswith("t5x."):
        return model.input_shapes(task_feature_lengths or {"inputs": 1, "targets": 1}), None
    return shapes_and_types(peek())


def first_batch(cfg: DatasetConfig, model: BaseModel) -> Batch:
    """Return the first batch of an evaluation."""
    converter = make_converter(model.FEATURE_CONVERTER_CLS, pack=False)
    return next(eval_batches(cfg, feature_converter=converter)).batch


class ExternalBatches(Iterator[Batch]):
    """Batches of a user's own function, with the interface of a loader.

    Their position is the number of batches returned so far; a resumed run skips this number of batches.

    Args:
      batches: {feature: array} each; may be a tf.data.Dataset.
    """

    def __init__(self, batches: Iterable[Mapping[str, Any]]):
        self._batches = batches
        self._iterator = numpy_batches(batches)
        self._taken = 0
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def __next__(self) -> Batch:
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise UserError(
                f"train.get_dataset_fn returned only {self._taken} batches. Repeat them in that function, or lower "
                "TRAIN_STEPS."
            ) from None
        shapes = {name: np.shape(array) for name, array in batch.items()}
        if self._shapes not in (None, shapes):
            raise UserError(
                f"Batch {self._taken + 1} of train.get_dataset_fn has the shapes {shapes}, those before it "
                f"{self._shapes}. Pad all batches to the same shapes and drop a smaller last one."
            )
        self._shapes = shapes
        self._taken += 1
        return batch

    def peek(self) -> Batch:
        """Return the next batch without consuming it."""
        batch = next(self)
        self._iterator = itertools.chain([batch], self._iterator)
        self._taken -= 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"own": True, "batches": self._taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        if not state.get("own"):
            raise UserError(
                "The checkpoint has a data position of t5x's own loader, which train.get_dataset_fn cannot resume. "
                "Remove train.get_dataset_fn, or start a run in another MODEL_DIR from the checkpoint."
            )
        if state["batches"] > self._taken:
            log.info("skipping the first %d batches of train.get_dataset_fn", state["batches"] - self._taken)
        while self._taken < state["batches"]:
            next(self)


def as_loader(batches: Any) -> TrainLoader | ExternalBatches:
    """Return the result of `train.get_dataset_fn` as a loader; `get_dataset` returns one already."""
    return batches if hasattr(batches, "restore") else ExternalBatches(batches)


def numpy_batches(batches: Iterable[Mapping[str, Any]]) -> Iterator[Batch]:
    """Yield batches of any library as NumPy arrays."""
    for batch in batches.as_numpy_iterator() if hasattr(batches, "as_numpy_iterator") else batches:
        yield {name: np.asarray(value) for name, value in batch.items()}
