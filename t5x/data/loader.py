"""Batches: endless and resumable for training, each example exactly once for evaluation."""

import logging
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x.data.config import DatasetConfig
from t5x.data.feature_converters import FeatureConverter, stack_rows
from t5x.data.lanes import Lane, Order, describe_difference, lane_states, seek_lanes
from t5x.data.pipeline import Example, Pipeline
from t5x.data.sources import BadExample
from t5x.data.tasks import Task
from t5x.errors import UserError

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
_STATE_VERSION = 1
_BATCHES_AHEAD = 4
_LENGTH_MULTIPLE = 8


def train_loader(
    cfg: DatasetConfig, *, feature_converter: FeatureConverter, rows: range | None = None
) -> "TrainLoader":
    """Endless batches of a task.

    Args:
      cfg: which data.
      feature_converter: makes the model's features.
      rows: those of the global batch that this process reads; None is all of them.
    """
    task = cfg.task()
    if cfg.pack and not feature_converter.pack:
        raise UserError("Packing is not available in this version: set --gin.utils.DatasetConfig.pack=False.")
    if cfg.task_feature_lengths is None:
        raise UserError("Training needs lengths: TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}.")
    feature_converter.check(tuple(task.output_features), cfg.task_feature_lengths, task.name)
    return TrainLoader(
        task.pipeline(cfg.split, cfg.task_feature_lengths, _seed(cfg), cfg.runtime_preprocessors),
        feature_converter,
        cfg.task_feature_lengths,
        batch_size=cfg.batch_size,
        rows=rows,
        shuffle=cfg.shuffle,
        trim=cfg.trim_output_features,
    )


class TrainLoader(Iterator[Batch]):
    """Batches {model feature: int32 [len(rows), length]}, prepared by a thread that runs a few batches ahead.

    Batch N is a function of the task, the seed and N alone: it is the same after `restore`, and the rows of all
    processes together are the same whatever their number.

    Args:
      pipeline: of the task.
      feature_converter: makes the model's features.
      task_feature_lengths: {task feature: length}.
      batch_size: rows of the global batch.
      rows: those of this process; None is all.
      shuffle: read in another order each epoch.
      trim: cut features that are too long.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        feature_converter: FeatureConverter,
        task_feature_lengths: Mapping[str, int],
        *,
        batch_size: int,
        rows: range | None = None,
        shuffle: bool = True,
        trim: bool = True,
    ):
        rows = range(batch_size) if rows is None else rows
        if not len(rows) or min(rows) < 0 or max(rows) >= batch_size:
            raise UserError(f"The rows {rows} are not rows of a batch of {batch_size}.")
        self._identity = {
            "version": _STATE_VERSION,
            "task": pipeline.name,
            "split": pipeline.split,
            "num_examples": len(pipeline),
            "seed": pipeline.seed,
            "shuffle": shuffle,
            "batch_size": batch_size,
        }
        order = Order(len(pipeline), pipeline.seed, shuffle)
        lanes = [Lane(row, batch_size, order, pipeline) for row in rows]
        self._lanes = lanes
        self._converter = feature_converter
        self._batches = 0
        self._lane_states = lane_states(lanes)
        self._ahead: _Ahead | None = None

        def produce() -> tuple[Batch, list[list[int]]]:
            made = []
            for lane in lanes:
                example, index = next(lane)
                made.append(_convert(feature_converter, example, task_feature_lengths, trim, pipeline.location, index))
            return stack_rows(made), lane_states(lanes)

        self._produce = produce

    def __next__(self) -> Batch:
        if self._ahead is None:
            self._ahead = _Ahead(self._produce, _BATCHES_AHEAD)
            weakref.finalize(self, self._ahead.stop)
        batch, self._lane_states = self._ahead.get()
        self._batches += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out: JSON-able, and small."""
        return self._identity | {"batches": self._batches, "lanes": self._lane_states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, by this process or (see `merge_states`) by any number of them."""
        found = {name: value for name, value in state.items() if name not in ("batches", "lanes")}
        if difference := describe_difference(self._identity, found):
            raise UserError(
                f"The saved position in the data is of other data: here, {difference} as saved. Go on with the data "
                "of the checkpoint, or start a run in another MODEL_DIR from its parameters "
                "(utils.RestoreCheckpointConfig.path, INITIAL_CHECKPOINT_PATH in finetune.gin)."
            )
        self._stop()
        seek_lanes(self._lanes, state["lanes"])
        self._lane_states = lane_states(self._lanes)
        self._batches = state["batches"]

    def close(self) -> None:
        """Ends the thread. The loader can be asked for batches again; it goes on where it was."""
        self._stop()
        seek_lanes(self._lanes, self._lane_states)
        for feature, count in self._converter.trimmed.items():
            logger.info("%r was cut to its length %d times", feature, count)

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Ahead:
    """Calls `produce` in a thread, at most `depth` results ahead."""

    def __init__(self, produce: Callable[[], Any], depth: int):
        self._results: queue.Queue = queue.Queue(depth)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(produce,), name="t5x-data", daemon=True)
        self._thread.start()

    def _run(self, produce: Callable[[], Any]) -> None:
        try:
            while not self._stopping.is_set():
                self._results.put((produce(), None))
        except BaseException as error:
            self._results.put((None, error))

    def get(self) -> Any:
        if self._error is None:
            result, self._error = self._results.get()
        if self._error is not None:
            raise self._error
        return result

    def stop(self) -> None:
        self._stopping.set()
        while self._thread.is_alive():
            try:
                self._results.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)


class EvalBatch(NamedTuple):
    """A batch for evaluation.

    Attributes:
      batch: {model feature: int32 [rows, length]}.
      mask: bool [rows]; False for the rows of zeros that fill the last batch.
      examples: of the true rows, in order: the task's features and whatever else its preprocessors kept.
    """

    batch: Batch
    mask: np.ndarray
    examples: list[Example]


def eval_batches(
    cfg_or_task: DatasetConfig | Task,
    *,
    feature_converter: FeatureConverter,
    split: str | None = None,
    feature_lengths: Mapping[str, int] | None = None,
    batch_size: int | None = None,
    rows: range | None = None,
    num_examples: int | None = None,
) -> Iterator[EvalBatch]:
    """Every example of a split exactly once, the last batch filled up with rows of zeros.

    Every process gets the same number of batches.

    Args:
      cfg_or_task: which data; a config gives the other arguments where they are None.
      feature_converter: makes the model's features.
      split: of the task.
      feature_lengths: {task feature: length}; None, also in the config, takes the longest, rounded up.
      batch_size: rows of the global batch.
      rows: those of it that this process wants; None is all.
      num_examples: stop after so many; None is all.
    """
    cfg = cfg_or_task if isinstance(cfg_or_task, DatasetConfig) else None
    task = cfg.task() if cfg else cfg_or_task
    if cfg:
        split, batch_size = split or cfg.split, batch_size or cfg.batch_size
        feature_lengths = feature_lengths or cfg.task_feature_lengths
    if split is None or batch_size is None:
        raise UserError(f"Evaluating task {task.name!r} needs a split and a batch size.")
    rows = range(batch_size) if rows is None else rows
    extra = cfg.runtime_preprocessors if cfg else None
    pipeline = task.pipeline(split, feature_lengths, _seed(cfg) if cfg else 0, extra)
    order = Order(len(pipeline), pipeline.seed, bool(cfg and cfg.shuffle))
    examples: Iterable[tuple[Example, int]] = _once(pipeline, order, num_examples)
    if feature_lengths is None:
        examples = list(examples)
        feature_lengths = measure_lengths([example for example, _ in examples], feature_converter.TASK_FEATURES)
        logger.info("Task %s, split %s: lengths measured: %s", task.name, split, feature_lengths)
    feature_converter.check(tuple(task.output_features), feature_lengths, task.name)
    trim = cfg.trim_output_features if cfg else True
    return _eval_batches(pipeline, examples, feature_converter, feature_lengths, batch_size, rows, trim)


def _eval_batches(
    pipeline: Pipeline,
    examples: Iterable[tuple[Example, int]],
    converter: FeatureConverter,
    lengths: Mapping[str, int],
    batch_size: int,
    rows: range,
    trim: bool,
) -> Iterator[EvalBatch]:
    for group in _groups(examples, batch_size):
        mine = [group[row] for row in rows if row < len(group)]
        made = [_convert(converter, example, lengths, trim, pipeline.location, index) for example, index in mine]
        padding = [converter.convert_row([], lengths)] * (len(rows) - len(mine))
        mask = np.arange(len(rows)) < len(mine)
        yield EvalBatch(stack_rows(made + padding), mask, [example for example, _ in mine])


def _once(pipeline: Pipeline, order: Order, limit: int | None) -> Iterator[tuple[Example, int]]:
    count = 0
    for position in range(order.size):
        epoch, index = order(position)
        for example in pipeline.outputs(epoch, index):
            if limit is not None and count == limit:
                return
            count += 1
            yield example, index
    if not count:
        raise UserError(f"No example is left in split {pipeline.split!r} of task {pipeline.name!r}: all are dropped.")


def _groups(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    group = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def measure_lengths(examples: Sequence[Example], features: Iterable[str]) -> dict[str, int]:
    """The longest of each feature, rounded up to a multiple of 8 so that few shapes are compiled."""
    longest = {feature: max(len(example[feature]) for example in examples) for feature in features}
    return {feature: math.ceil(max(n, 1) / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE for feature, n in longest.items()}


def _convert(
    converter: FeatureConverter,
    example: Example,
    lengths: Mapping[str, int],
    trim: bool,
    location: Callable[[int], str],
    index: int,
) -> Batch:
    try:
        return converter.convert_row([example], lengths, trim=trim)
    except UserError as error:
        raise BadExample(f"{location(index)}: {error}") from error


def _seed(cfg: DatasetConfig) -> int:
    if cfg.seed is None:
        logger.info("Split %r of %s: no seed given; it is 0", cfg.split, cfg.mixture_or_task_name)
        return 0
    return int(cfg.seed)
