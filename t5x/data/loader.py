"""Batches: endless and resumable for training, each example exactly once for evaluation."""

import dataclasses
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data import worker_process
from t5x.data.data_fingerprint import describe_changes, start_fingerprint
from t5x.data.dataset_config import DatasetConfig
from t5x.data.feature_converters import FeatureConverter, stack_rows
from t5x.data.lanes import (
    BadExamples,
    LaneConfig,
    Order,
    describe_differences,
    join_states,
    resized_states,
    states_of_rows,
)
from t5x.data.pipeline import ConcatenateAndSplit, Example, Pipeline
from t5x.data.sources import BadExample
from t5x.data.tasks import Task, check_split, get_subtasks, task_rates

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
States = list[list[int]]
_STATE_VERSION = 2
_BATCHES_AHEAD = 4
_PATIENCE = 10.0  # seconds to wait for a thread to stop
_LENGTH_MULTIPLE = 8


def train_loader(
    cfg: DatasetConfig, *, feature_converter: FeatureConverter, rows: range | None = None
) -> "TrainLoader":
    """Return a loader of endless batches of a task or mixture.

    Args:
      cfg: the dataset.
      feature_converter: makes the model's features.
      rows: rows of the global batch that this process reads; None reads all.
    """
    if cfg.task_feature_lengths is None:
        raise UserError("Training needs lengths. Set TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}.")
    task_or_mixture = cfg.mixture_or_task()
    check_split(task_or_mixture, cfg.split)
    rates = {task: rate for task, rate in task_rates(task_or_mixture).items() if cfg.split in task.splits}
    for task in rates:
        feature_converter.check(tuple(task.output_features), cfg.task_feature_lengths, task.name)
    _check_vocabularies(list(rates), feature_converter.task_features(cfg.task_feature_lengths))
    if len(rates) > 1:
        total = sum(rates.values())
        shares = ", ".join(f"{task.name} {100 * rate / total:.3g} %" for task, rate in rates.items())
        logger.info("mixture %s: %s", task_or_mixture.name, shares)
    seed = _seed(cfg)
    lengths, extra = cfg.task_feature_lengths, cfg.runtime_preprocessors
    config = LaneConfig(
        [task.pipeline(cfg.split, lengths, seed, extra, need_text=False, use_cached=cfg.use_cached) for task in rates],
        list(rates.values()),
        feature_converter,
        lengths,
        cfg.batch_size,
        cfg.shuffle,
        cfg.trim_output_features,
        BadExamples(cfg.skip_bad_examples),
    )
    return TrainLoader(config, rows=rows, num_workers=cfg.num_workers)


def _check_vocabularies(tasks: Sequence[Task], features: Iterable[str]) -> None:
    """Raise a UserError unless all tasks have the same vocabulary for each feature."""
    for task in tasks[1:]:
        for name in features:
            first, other = (one.output_features[name].vocabulary for one in (tasks[0], task))
            if first != other:
                raise UserError(
                    f"Cannot mix the tasks {tasks[0].name!r} and {task.name!r}: their vocabularies of {name!r} differ "
                    f"({first!r} and {other!r}). Use the same vocabulary in both."
                )


class TrainLoader(Iterator[Batch]):
    """Batches {model feature: int32 [len(rows), length]}, prepared a few ahead by a thread or by worker processes.

    Batch N depends only on the tasks, the seed and N: it is the same after `restore`, and the rows of all processes
    together are the same for any number of processes and workers.

    Args:
      config: the data and how rows are made of it.
      rows: rows of the global batch that this process reads; None reads all.
      num_workers: number of processes that make the rows; 0 uses a thread of this one; None chooses by the number of
        cores.

    Attributes:
      counts: numbers of examples skipped for and features truncated in the batches returned so far.
    """

    def __init__(self, config: LaneConfig, *, rows: range | None = None, num_workers: int | None = 0):
        rows = range(config.batch_size) if rows is None else rows
        if not len(rows) or min(rows) < 0 or max(rows) >= config.batch_size:
            raise UserError(f"The rows {rows} are not rows of a batch of {config.batch_size}.")
        self._config, self._identity = config, _identity(config)
        count = min(default_workers() if num_workers is None else num_workers, len(rows))
        local = LocalRows(config, rows)
        self._states = local.states()
        self._source: LocalRows | WorkerRows = WorkerRows(config, rows, count) if count else local
        weakref.finalize(self, self._source.close)
        self._batches = 0
        self._prefetcher: Prefetcher | None = None
        self.counts = Counts()

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            self._source.seek(self._states)
            self._prefetcher = Prefetcher(self._source.next, _BATCHES_AHEAD)
            weakref.finalize(self, self._prefetcher.stop, _PATIENCE)
        built = self._prefetcher.get()
        self._states = built.states
        self.counts += built.counts
        self._batches += 1
        return built.batch

    def peek(self) -> Batch:
        """Return the next batch without advancing."""
        position = self.state()
        batch = next(self)
        self.restore(position)
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch returned, small and JSON-serializable."""
        return self._identity | {"batches": self._batches, "lanes": self._states}

    def start_fingerprint(self) -> "Future[dict[str, Any]]":
        """Start computing the fingerprint of the data for `changes`. Call it before the first batch."""
        return start_fingerprint(self._config.pipelines, self._config.converter, self._config.lengths)

    def content_bytes(self) -> int:
        """Return the number of bytes in files that the fingerprint covers."""
        return sum(pipeline.content_bytes() for pipeline in self._config.pipelines)

    def changes(self, state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[str]:
        """Describe how the data has changed since `state` was saved.

        Args:
          state: a saved state, with its `fingerprint` if known.
          fingerprint: the current fingerprint.
        """
        before = state.get("fingerprint")
        detailed = [] if before is None else ["pack", "lengths"]  # those in the fingerprint
        changes = describe_differences(self._identity, _identity_in(state), ignore=["batch_size", *detailed])
        if before is None:
            logger.info("the saved data position has no fingerprint: cannot check whether the data has changed")
            return changes
        return changes + describe_changes(before, fingerprint)

    def restore(self, state: Mapping[str, Any], *, changed_data: bool = False) -> None:
        """Resume from `state`, saved by this process or (see `merge_states`) by any number of processes.

        Args:
          changed_data: accept a position saved with other data.
        """
        saved_identity = _identity_in(state)
        if "lanes" not in state:
            raise UserError(
                "The saved data position belongs to train.get_dataset_fn. Use that function again, or start a run in "
                "another MODEL_DIR from the checkpoint."
            )
        lanes, size, saved_size = state["lanes"], self._identity["batch_size"], saved_identity.get("batch_size")
        differences = describe_differences(self._identity, saved_identity, ignore=["batch_size"])
        if differences and not changed_data:
            raise UserError(
                f"The saved data position belongs to other data: {'; '.join(differences)} as saved. Use the data of "
                "the checkpoint, or start a run in another MODEL_DIR from its parameters "
                "(utils.RestoreCheckpointConfig.path, INITIAL_CHECKPOINT_PATH in finetune.gin)."
            )
        if saved_identity.get("version") != _STATE_VERSION or any(len(run) != len(self._states[0]) for run in lanes):
            raise UserError(
                "The saved data position belongs to another number of tasks. Start at the beginning of the data: "
                "train.on_changed_data = 'restart'."
            )
        if saved_size != size:
            lanes = resized_states(lanes, saved_identity["batch_size"], size)
            logger.warning(
                "the batch size was %d and is %d: all rows resume after the last example that any row has read",
                saved_size, size,
            )  # fmt: skip
        rows = [run[0] + i for run in self._states for i in range(run[1])]
        states = join_states(states_of_rows(rows, lanes))
        self._stop()
        self._states, self._batches = states, state["batches"]

    def close(self) -> None:
        """Stop threads and workers, and log the numbers of skipped examples and truncated features."""
        self._source.close()  # first: the thread may be waiting for a worker
        self._stop(_PATIENCE)
        counts, self.counts = self.counts, Counts()
        for feature, count in counts.trimmed.items():
            logger.info("%r was truncated to its length %d times", feature, count)
        if counts.bad:
            logger.warning("skipped %d bad example(s)", counts.bad)

    def _stop(self, patience: float = math.inf) -> None:
        if self._prefetcher is not None:
            self._prefetcher.stop(patience)
            self._prefetcher = None

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _identity_in(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("batches", "lanes", "fingerprint")}


def _identity(config: LaneConfig) -> dict[str, Any]:
    """Return what a saved position belongs to."""
    pipelines, converter = config.pipelines, config.converter
    tasks = [{"task": pipeline.name, "split": pipeline.split, "num_examples": len(pipeline)} for pipeline in pipelines]
    identity: dict[str, Any] = {"version": _STATE_VERSION, **tasks[0]}
    if len(tasks) > 1:
        rated = [task | {"rate": rate} for task, rate in zip(tasks, config.rates, strict=True)]
        identity = {"version": _STATE_VERSION, "tasks": rated}
    identity |= {"seed": pipelines[0].seed, "shuffle": config.shuffle, "batch_size": config.batch_size}
    if converter.pack or any(pipeline.pieces for pipeline in pipelines):  # positions depend on them
        identity |= {"pack": converter.pack, "lengths": dict(config.lengths)}
    return identity


def default_workers() -> int:
    """Return the default number of worker processes: up to half of the cores, 0 if there are few."""
    return min(8, max(0, (worker_process.available_cores() - 2) // 2))


# --- Threads and processes --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of skipped examples and truncated features.

    Attributes:
      bad: number of bad examples that were skipped.
      trimmed: number of times each feature was truncated.
    """

    bad: int = 0
    trimmed: Counter[str] = dataclasses.field(default_factory=Counter)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.bad + other.bad, self.trimmed + other.trimmed)

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.bad - other.bad, self.trimmed - other.trimmed)


class BuiltBatch(NamedTuple):
    """A batch, the lane states after it, and the counts for it."""

    batch: Batch
    states: States
    counts: Counts


class LocalRows:
    """Rows made in this process."""

    def __init__(self, config: LaneConfig, rows: Sequence[int]):
        self._config = config
        self._lanes = config.lanes(rows)

    def seek(self, states: States) -> None:
        mine = states_of_rows([lane.row for lane in self._lanes], states)
        for lane, (_, _, *state) in zip(self._lanes, mine, strict=True):
            lane.seek(state)

    def states(self) -> States:
        return join_states([lane.row, 1, *lane.state()] for lane in self._lanes)

    def next(self) -> BuiltBatch:
        before = self._counts()
        batch = stack_rows([lane.next_row() for lane in self._lanes])
        return BuiltBatch(batch, self.states(), self._counts() - before)

    def close(self) -> None:
        pass

    def _counts(self) -> Counts:
        trimmed = sum((pipeline.trimmed for pipeline in self._config.pipelines), self._config.converter.trimmed)
        return Counts(self._config.bad.count, trimmed)


class WorkerRows:
    """Rows made by `count` processes; the i-th row belongs to worker i % count.

    A worker receives the `LaneConfig` once, then the positions to start from. It sends rows endlessly; the connection
    blocks it while nobody reads.
    """

    def __init__(self, config: LaneConfig, rows: Sequence[int], count: int):
        work = worker_process.pickled(config, "Set utils.DatasetConfig.num_workers=0")
        fix = "Set utils.DatasetConfig.num_workers=0 to read the data in this process."
        self._rows = [list(rows[number::count]) for number in range(count)]
        self._workers = [
            worker_process.Worker(send_rows, work, f"Data worker process {number}", fix) for number in range(count)
        ]
        self._start: States | None = None

    def seek(self, states: States) -> None:
        self._start = states  # `next` sends it, because sending waits for the workers to start

    def next(self) -> BuiltBatch:
        if self._start is not None:
            for worker, rows in zip(self._workers, self._rows, strict=True):
                worker.send([rows, self._start])
            self._start = None
        answers = (worker.receive() for worker in self._workers)
        parts = [BuiltBatch(batch, states, Counts(bad, Counter(trimmed))) for batch, states, bad, trimmed in answers]
        batch = {}
        for name, first in parts[0].batch.items():
            batch[name] = np.empty((sum(map(len, self._rows)), *first.shape[1:]), first.dtype)
            for number, part in enumerate(parts):
                batch[name][number :: len(parts)] = part.batch[name]
        states = join_states(sorted(run for part in parts for run in part.states))
        return BuiltBatch(batch, states, sum((part.counts for part in parts), Counts()))

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


def send_rows(config: LaneConfig, command: tuple[list[int], States], parent: worker_process.Parent) -> None:
    """Send rows endlessly, in a worker.

    Args:
      command: the numbers of the rows, and the states to start from.
    """
    numbers, start = command
    rows = LocalRows(config, numbers)
    rows.seek(start)
    while not parent.has_command():
        batch, states, counts = rows.next()
        parent.send([batch, states, counts.bad, counts.trimmed])


class Prefetcher:
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

    def stop(self, patience: float = math.inf) -> None:
        """Stop the thread after its current call; after `patience` seconds, stop waiting for it."""
        self._stopping.set()
        end = time.monotonic() + patience
        while self._thread.is_alive() and time.monotonic() < end:
            try:
                self._results.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)


# --- Evaluation -------------------------------------------------------------------------------------------------------


class EvalBatch(NamedTuple):
    """A batch for evaluation.

    Attributes:
      batch: {model feature: int32 [rows, length]}.
      mask: bool [rows]; False for the rows of zeros that fill the last batch.
      examples: the examples of the rows that are not padding, in order: the task's features and all other fields that
        its preprocessors kept.
    """

    batch: Batch
    mask: np.ndarray
    examples: list[Example]


def eval_batches(
    cfg: DatasetConfig,
    *,
    feature_converter: FeatureConverter,
    rows: range | None = None,
    num_examples: int | None = None,
) -> Iterator[EvalBatch]:
    """Yield every example of a split exactly once, task by task; rows of zeros fill the last batch.

    Every process gets the same number of batches.

    Args:
      cfg: the dataset. Without task_feature_lengths, they are those of the longest example, rounded up.
      feature_converter: makes the model's features.
      rows: rows of the global batch that this process reads; None reads all.
      num_examples: stop after N examples; None reads all.
    """
    task_or_mixture, split, lengths = cfg.mixture_or_task(), cfg.split, cfg.task_feature_lengths
    tasks = [task for task in get_subtasks(task_or_mixture) if split in task.splits] or get_subtasks(task_or_mixture)
    seed, extra = _seed(cfg), cfg.runtime_preprocessors
    pipelines = [task.pipeline(split, lengths, seed, extra, use_cached=cfg.use_cached) for task in tasks]
    bad = BadExamples(cfg.skip_bad_examples)
    examples: Iterable[_Once] = itertools.chain.from_iterable(read_once(p, cfg.shuffle, bad) for p in pipelines)
    if lengths is None:
        examples = list(itertools.islice(examples, num_examples))
        features = feature_converter.task_features(task_or_mixture.output_features)
        lengths = measure_lengths([one.example for one in examples], features)
        logger.info("%s, split %s: longest lengths, rounded up: %s", task_or_mixture.name, split, lengths)
    for task in tasks:
        feature_converter.check(tuple(task.output_features), lengths, task.name)
    rows = range(cfg.batch_size) if rows is None else rows

    def convert(one: _Once) -> Batch:
        with one.pipeline.located(one.source_index):
            return feature_converter.convert_row([one.example], lengths, trim=cfg.trim_output_features)

    def fits(one: _Once) -> bool:
        try:
            convert(one)
        except BadExample as error:
            bad.add(error)
            return False
        return True

    def batches() -> Iterator[EvalBatch]:
        # Every process checks all examples, so that all agree on the rows.
        fitting = filter(fits, examples) if bad.skip else examples
        usable = itertools.islice(fitting, num_examples)
        while group := list(itertools.islice(usable, cfg.batch_size)):
            mine = [group[row] for row in rows if row < len(group)]
            converted = [convert(one) for one in mine]
            converted += [feature_converter.convert_row([], lengths) for _ in range(len(rows) - len(mine))]
            yield EvalBatch(stack_rows(converted), np.arange(len(rows)) < len(mine), [one.example for one in mine])

    return batches()


class _Once(NamedTuple):
    example: Example
    pipeline: Pipeline
    source_index: int


def read_once(pipeline: Pipeline, shuffle: bool, bad: BadExamples) -> Iterator[_Once]:
    """Yield every example of a split once; if examples are joined, the last piece is shorter."""
    order = Order(len(pipeline), pipeline.seed, shuffle)
    count = 0
    in_order = read_positions(pipeline, order, bad, range(order.size))
    for _, index, outputs in _pieces(pipeline, pipeline.pieces, in_order) if pipeline.pieces else in_order:
        for example in outputs:
            count += 1
            yield _Once(example, pipeline, index)
    if not count:
        raise UserError(f"All examples in split {pipeline.split!r} of task {pipeline.name!r} are dropped or skipped.")


def read_positions(
    pipeline: Pipeline, order: Order, bad: BadExamples, positions: Iterable[int]
) -> Iterator[tuple[int, int, list[Example]]]:
    """Yield (position, index of the source example, its outputs) of these positions in the order."""
    for position in positions:
        epoch, index = order(position)
        try:
            yield position, index, pipeline.outputs(epoch, index)
        except BadExample as error:
            bad.add(error)


def _pieces(
    pipeline: Pipeline, pieces: ConcatenateAndSplit, documents: Iterable[tuple[int, int, list[Example]]]
) -> Iterator[tuple[int, int, list[Example]]]:
    length, feature = pieces.length, pieces.feature
    parts, joined, number, index = [], 0, 0, 0
    for _, index, outputs in documents:
        for example in outputs:
            parts.append(np.asarray(example[feature]))
            joined += len(parts[-1])
            while joined >= length:
                tokens = np.concatenate(parts)
                yield number, index, pipeline.piece_outputs(tokens[:length], (number,), index)
                parts, joined, number = [tokens[length:]], joined - length, number + 1
    if joined:
        yield number, index, pipeline.piece_outputs(np.concatenate(parts), (number,), index)


def measure_lengths(examples: Sequence[Example], features: Iterable[str]) -> dict[str, int]:
    """Return the longest length of each feature, rounded up."""
    return {feature: round_up_length(max(len(example[feature]) for example in examples)) for feature in features}


def round_up_length(length: int) -> int:
    """Return a length rounded up to a multiple of 8, so that few shapes are compiled."""
    return math.ceil(max(length, 1) / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def _seed(cfg: DatasetConfig) -> int:
    if cfg.seed is None:
        logger.info("Split %r of %s: no seed is set; using 0", cfg.split, cfg.mixture_or_task_name)
        return 0
    return int(cfg.seed)
