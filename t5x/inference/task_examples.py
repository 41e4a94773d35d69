"""The examples of a task for inference: in order, from any position, split into shards."""

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x.data import cache_reader, preprocessors
from t5x.data.dataset_config import DatasetConfig
from t5x.data.example_order import Order
from t5x.data.lanes import BadExamples
from t5x.data.loader import read_once, read_positions, round_up_length
from t5x.data.pipeline import Example, count_cacheable, name_of
from t5x.data.sources import TFExampleDataSource
from t5x.data.specs import Feature
from t5x.data.tasks import Task, TaskRegistry
from t5x.inference.jobs import WHOLE, Shard


@dataclasses.dataclass(frozen=True, slots=True)
class IndexedExample:
    """An example with its position.

    Attributes:
      index: keys the example's random numbers: the index of the source example, for any number of shards.
      after: position from which `TaskExamples.read` continues after this example.
    """

    example: Example
    index: int
    after: tuple[int, int]


def identity(task: Task, cfg: DatasetConfig) -> dict[str, Any]:
    """Return what identifies the examples of a task, without reading them.

    Call it before they are read: functions may cache values, which would change their hash.

    Returns:
      `preprocessors` by name, `examples` (number of source examples) and `data`: a hash of the source (of files by size
      and time), the vocabularies, and the preprocessors before the first that is random or depends on lengths.
    """
    pipeline = task.pipeline(cfg.split, cfg.task_feature_lengths, int(cfg.seed or 0), use_cached=cfg.use_cached)
    steps = count_cacheable(task.preprocessors)
    try:
        described = cache_reader.identity(task, cfg.split, steps, source=pipeline.source_fingerprint())
    except RecursionError:  # a function refers to objects nested too deeply to hash
        described = {}
    return {
        "preprocessors": [name_of(step) for step in (*task.preprocessors, *(cfg.runtime_preprocessors or ()))],
        "data": hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16],
        "examples": len(pipeline),
    }


class TaskExamples:
    """A shard of the examples of a task: a contiguous part of its source.

    Args:
      cfg: split and order.
      lengths: {feature: length}, for preprocessors that truncate.
    """

    def __init__(self, task: Task, cfg: DatasetConfig, lengths: Mapping[str, int] | None, shard: Shard = WHOLE):
        self._pipeline = task.pipeline(
            cfg.split, lengths, int(cfg.seed or 0), cfg.runtime_preprocessors, use_cached=cfg.use_cached
        )
        self._bad = BadExamples(cfg.skip_bad_examples)
        self._shuffle = cfg.shuffle
        if self._pipeline.pieces and shard.count > 1:
            raise UserError(
                f"Task {task.name!r} joins documents, so that each example depends on all before it: it cannot be read "
                "in shards. Set infer.num_shards = 1, or shard its files."
            )
        self._range = shard.range(len(self._pipeline))

    def __len__(self) -> int:
        """Number of source examples; preprocessing may make more or fewer of them."""
        return len(self._range)

    def read(self, after: Sequence[int] | None = None) -> Iterator[IndexedExample]:
        """Yield the examples from the first, or after a position."""
        if self._pipeline.pieces:
            yield from self._read_pieces(0 if after is None else after[0])
            return
        order = Order(len(self._pipeline), self._pipeline.seed, self._shuffle)
        start, skip = (self._range.start, 0) if after is None else after
        positions = range(start, self._range.stop)
        for position, index, examples in read_positions(self._pipeline, order, self._bad, positions):
            for nth, example in enumerate(examples[skip:], start=skip):
                # Several examples from one source example get different keys.
                key = index if nth == 0 else zlib.crc32(f"{index} {nth}".encode())
                yield IndexedExample(example, key, (position, nth + 1))
            skip = 0

    def _read_pieces(self, first: int) -> Iterator[IndexedExample]:
        for number, piece in enumerate(read_once(self._pipeline, self._shuffle, self._bad)):
            if number >= first:
                yield IndexedExample(piece.example, number, (number + 1, 0))

    def measure(self, features: Sequence[str]) -> dict[str, int]:
        """Return the maximum length of each feature, rounded up to a multiple of 8."""
        longest = dict.fromkeys(features, 1)
        for indexed in self.read():
            for feature in features:
                longest[feature] = max(longest[feature], len(indexed.example[feature]))
        return {feature: round_up_length(length) for feature, length in longest.items()}


def create_task_from_tfexample_file(
    paths: str | Sequence[str],
    file_type: str,
    inputs_key: str,
    targets_key: str | None,
    features: Mapping[str, Feature],
    task_id: str | None = None,
) -> str:
    """Register a task that reads tf.train.Example messages from TFRecord files, without TensorFlow.

    Args:
      paths: files or patterns.
      file_type: `tfrecord`.
      inputs_key: the feature with the text of `inputs`.
      targets_key: the feature with the text of `targets`; None without targets.
      features: the task's output features.
      task_id: used in the name; None derives it from the paths and keys.

    Returns:
      The name of the task, `infer_<task_id>`. Its split is `infer`.
    """
    if file_type != "tfrecord":
        raise UserError(f"create_task_from_tfexample_file.file_type is {file_type!r}: it must be 'tfrecord'.")
    paths = [paths] if isinstance(paths, str) else list(paths)
    if task_id is None:
        task_id = hashlib.md5(":".join([*paths, inputs_key, targets_key or ""]).encode()).hexdigest()[:10]
    name = f"infer_{task_id}"
    if name in TaskRegistry.names():
        return name
    described = {key: "text" for key in (inputs_key, targets_key) if key}
    rekey = functools.partial(preprocessors.rekey, key_map={"inputs": inputs_key, "targets": targets_key})
    TaskRegistry.add(
        name,
        TFExampleDataSource({"infer": paths}, described),
        output_features=features,
        preprocessors=[rekey, preprocessors.tokenize_and_append_eos],
    )
    return name
