"""Inference over a task: a job whose chunks are written and merged by functions with T5X's signatures."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x._runtime.errors import UserError
from t5x.data import cache_reader, preprocessors
from t5x.data.dataset_config import DatasetConfig
from t5x.data.feature_converters import EncDecFeatureConverter
from t5x.data.lanes import BadExamples, Order
from t5x.data.loader import read_once, read_positions, round_up_length
from t5x.data.pipeline import Example, Feature, count_cacheable, name_of
from t5x.data.seqio_converters import make_converter
from t5x.data.sources import TFExampleDataSource
from t5x.data.tasks import Task, TaskRegistry
from t5x.data.vocabularies import Vocabulary
from t5x.files.digests import digest_of
from t5x.files.directory import open_directory
from t5x.inference.engine import Engine
from t5x.inference.generation import without_padding
from t5x.inference.jobs import WHOLE, JobProgress, Record, ResumableJob, Shard
from t5x.inference.output import (
    COMPLETED,
    JOB_FILE,
    Chunks,
    Output,
    changed_error,
    is_intact,
    merge,
    read_json,
    refuse_foreign,
)
from t5x.models import BaseTransformerModel
from t5x.network.padding import MaskingVariants
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

_WRITTEN = "written"  # key in the .COMPLETED file: digest that shows whether the results were changed later


# --- The examples of a task: in order, from any position, split into shards -------------------------------------------


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


def task_identity(task: Task, cfg: DatasetConfig) -> dict[str, Any]:
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


# --- The job and its output -------------------------------------------------------------------------------------------


def batch_function(model: BaseTransformerModel, mode: str) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return the function of a batch: (predictions or scores, {name: auxiliary output})."""

    def score(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[Any, dict[str, Any]]:
        scores = model.score_batch(params, batch)
        return (scores[0], dict(scores[1])) if isinstance(scores, tuple) else (scores, {})

    def predict(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[Any, dict[str, Any]]:
        if mode == "predict" and type(model).predict_batch is not BaseTransformerModel.predict_batch:
            return model.predict_batch(params, batch, rng=rng), {}
        tokens, aux = model.predict_batch_with_aux(params, batch, rng=rng)
        return tokens, {name: value for name, value in aux.items() if name == "scores" or mode == "predict_with_aux"}

    return score if mode == "score" else predict


@dataclasses.dataclass(kw_only=True)
class TaskJob(ResumableJob):
    """Inference over the examples of a task.

    Features are padded only as far as a batch needs if nothing else depends on the padding: with our own
    encoder-decoder features, and if the model returns nothing but a score for each example.

    Args:
      program: the compiled `batch_function`.
      cfg: the dataset, of one task.
      lengths: {feature: length}.
      examples: the examples of the task, or of a shard.
      job: what the results depend on.
      chunk_size: examples per chunk.
      keep_aux_as_numpy: return auxiliary outputs as arrays, not lists.
      keep_position: store the data position with each chunk; otherwise a resumed run reads the data before it again.
    """

    description: str
    engine: Engine
    program: MaskingVariants
    cfg: DatasetConfig
    lengths: Mapping[str, int]
    mode: str
    examples: TaskExamples
    job: dict[str, Any]
    chunk_size: int
    keep_aux_as_numpy: bool
    keep_position: bool

    def __post_init__(self):
        self.total = len(self.examples)
        converter = make_converter(self.engine.model.FEATURE_CONVERTER_CLS, pack=False)
        task = self.cfg.mixture_or_task()
        converter.check(tuple(task.output_features), self.lengths, task.name)
        self.lengths = {feature: self.lengths[feature] for feature in converter.task_features(self.lengths)}
        # Outputs of an example besides its score, such as values for each of its tokens.
        batch = self.program, self.lengths, self.cfg.batch_size
        more = set(self.engine.shapes(*batch)[1]) - {"scores"}
        self._row_axes = self.engine.row_axes(*batch) if more else None
        self._bucketed: tuple[str, ...] = ()
        if type(converter) is EncDecFeatureConverter and not more:
            self._bucketed = ("inputs", "targets") if self.mode == "score" else ("inputs",)

    def identity(self) -> dict[str, Any]:
        return self.job

    def resume(self, finished: Sequence[Record], output: Output) -> tuple[list[Record], Iterator[list[IndexedExample]]]:
        return list(finished), self._chunks(finished)

    def compute(self, chunk: list[IndexedExample], progress: JobProgress) -> tuple[Any, Record]:
        """See `ResumableJob`. The content is ((predictions or scores, {name: a value for each example}), examples)."""
        examples = [indexed.example for indexed in chunk]
        results = self.engine.run(
            self.program,
            examples,
            self.lengths,
            rows=self.cfg.batch_size,
            bucketed=self._bucketed,
            indices=[indexed.index for indexed in chunk],
            trim=self.cfg.trim_output_features,
            row_axes=self._row_axes,
            after_batch=progress.after_batch(),
        )
        leaf = np.stack if self.keep_aux_as_numpy else lambda rows: [row.tolist() for row in rows]
        aux = jax.tree.map(lambda *rows: leaf(rows), *(aux for _, aux in results))
        record = {"examples": len(chunk), "after": chunk[-1].after if self.keep_position else None}
        return (([tokens for tokens, _ in results], aux), examples), record

    def _chunks(self, finished: Sequence[Record]) -> Iterator[list[IndexedExample]]:
        done = sum(record["examples"] for record in finished)
        if finished and finished[-1]["after"] is not None:
            examples = self.examples.read(finished[-1]["after"])
        else:
            examples = itertools.islice(self.examples.read(), done, None)
        while chunk := list(itertools.islice(examples, self.chunk_size)):
            yield chunk
            done += len(chunk)
        if not done and self.total:
            raise UserError(f"{self.description}: no examples are left; the preprocessors of the task drop them.")


class TaskOutput(Output):
    """The output file of a task, with a `.COMPLETED` file beside it.

    Args:
      path: path of the file.
      write: `write(path, results, examples)` writes a chunk.
      merge: `merge(output_dir, name, chunk_dir)` merges the chunks; None keeps them. Its directories are local: what it
        writes to `output_dir` is uploaded if `path` is remote.
      merges_to_path: whether `merge` is our own function, so that `path` must exist in the end. A custom function may
        write the results anywhere.
    """

    def __init__(
        self,
        path: str,
        job: Mapping[str, Any],
        write: Callable[[str, Any, list[Any]], None],
        merge: Callable[[str, str, str], None] | None,
        *,
        merges_to_path: bool,
    ):
        super().__init__(path)
        self._job = json.loads(json.dumps(job))
        self._write = write
        self._merge = merge
        self._merges_to_path = merge is not None and merges_to_path

    def is_complete(self) -> bool:
        """Return whether the results exist. If so, remove chunks that a killed run left behind.

        Raises:
          UserError: the results belong to another job or have changed since they were written, or t5x did not create
            the directory for the chunks.
        """
        path, completed = self.path, self._name + COMPLETED
        chunk_files = open_directory(self.directory)
        is_merged = self._parent.exists(self._name)
        if not self._parent.exists(completed) or (self._merges_to_path and not is_merged):
            refuse_foreign(chunk_files, self._name)
            return False
        if (earlier := read_json(self._parent, completed)) is None:
            raise UserError(f"{path}{COMPLETED} is damaged. Remove it and {path}; the next run writes both again.")
        written = earlier.pop(_WRITTEN, {})
        if earlier != self._job:
            names = [name for name in self._job if earlier.get(name) != self._job[name]]
            raise UserError(
                f"{path} contains the results of a different run ({', '.join(names)} differ). Choose another "
                f"INFER_OUTPUT_DIR, or remove the file and its {COMPLETED} file."
            )
        if is_merged and not is_intact(self._parent, self._name, written):
            raise changed_error(path, f"To compute it again, move it and its {COMPLETED} file away.")
        if chunk_files.exists(JOB_FILE):
            with contextlib.closing(Chunks(self.directory, self._name, self._job)) as chunks:
                if self._merge is not None:
                    chunks.remove()
                elif len(chunks.finished) < written.get("chunks", 0):
                    return False
        return True

    def finish(self, after_merge: Callable[[str], None] = lambda path: None) -> None:
        if self._chunks is None:
            return
        written: Mapping[str, Any] = {"chunks": len(self._chunks.finished)}
        if self._merge is not None:
            chunk_files = open_directory(self.directory)
            with chunk_files.reading(*chunk_files.names()) as chunks, self._parent.writing(self._name) as path:
                self._merge(os.path.dirname(path), self._name, chunks)
                if os.path.isfile(path):
                    written = digest_of(path)
            log.info("wrote %s", self.path)
        jsonl.replace(self.path + COMPLETED, [json.dumps({**self._job, _WRITTEN: written}).encode()])
        if self._merge is not None:
            self._chunks.remove()

    def _write_chunk(self, path: str, content: tuple[Any, list[Any]]) -> None:
        self._write(path, *content)


Inferences = tuple[Sequence[Any], Mapping[str, Any]]


def write_inferences_to_file(
    path: str,
    inferences: Inferences,
    task_ds: Iterable[Mapping[str, Any]],
    mode: str,
    vocabulary: Vocabulary | None = None,
    json_encoder_cls: type[json.JSONEncoder] | None = None,
    include_all_inputs: bool = False,
    input_fields_to_include: Sequence[str] | None = None,
    output_ids: bool = False,
) -> None:
    """Write a chunk of results as JSON lines: `inputs`, `prediction` and/or `score`, and `aux`.

    Args:
      inferences: (predictions, aux): the ids of each prediction, or each score; and {name: a value for each example}.
      task_ds: the examples.
      mode: `predict`, `predict_with_aux` or `score`.
      vocabulary: decodes predictions.
      json_encoder_cls: encodes types that JSON does not have; None writes arrays as lists.
      include_all_inputs: write all features of the example to `inputs`, not only those that end in `_pretokenized`.
      input_fields_to_include: write these features instead.
      output_ids: also write `prediction_tokens`, without padding.
    """
    predictions, aux = inferences
    with open(path, "wb") as file:
        for i, (example, prediction) in enumerate(zip(task_ds, predictions, strict=True)):
            record: dict[str, Any] = {"inputs": _inputs(example, include_all_inputs, input_fields_to_include)}
            if mode == "score":
                record["score"] = np.asarray(prediction).tolist()
            else:
                record |= _prediction(np.asarray(prediction), vocabulary, output_ids)
            if mode == "predict":
                record |= {"score": np.asarray(aux["scores"][i]).tolist()} if "scores" in aux else {}
            elif aux:
                record["aux"] = {name: _of_example(values, i) for name, values in aux.items()}
            file.write(_encode(record, json_encoder_cls))


def merge_chunks_to_file(output_dir: str, output_fname: str, tmp_dir: str, step: int | None = None) -> None:
    """Merge the chunks `<tmp_dir>/<output_fname>-chunk00000` and so on into the output.

    Args:
      step: step of the checkpoint, for custom functions.
    """
    start = f"{output_fname}-chunk"
    directory = open_directory(tmp_dir)
    names = [name for name in directory.names() if name.startswith(start) and name[len(start) :].isdigit()]
    names.sort(key=lambda name: int(name[len(start) :]))
    if names != [f"{start}{i:05}" for i in range(len(names))]:
        raise UserError(f"{tmp_dir} lacks a chunk: it has {', '.join(names)}. Remove the directory to start over.")
    merge(os.path.join(output_dir, output_fname), directory, names)


def _inputs(example: Mapping[str, Any], every: bool, fields: Sequence[str] | None) -> dict[str, Any]:
    if fields is not None:
        if missing := [field for field in fields if field not in example]:
            raise UserError(
                f"write_inferences_to_file.input_fields_to_include has {missing[0]!r}, which is not a field of the "
                f"examples. Fields: {', '.join(sorted(example))}."
            )
        return {field: example[field] for field in fields}
    return {name: value for name, value in example.items() if every or name.endswith("_pretokenized")}


def _prediction(ids: np.ndarray, vocabulary: Vocabulary | None, output_ids: bool) -> dict[str, Any]:
    if vocabulary is None:
        raise UserError("write_inferences_to_file needs a vocabulary to decode predictions.")
    several = ids.ndim > 1
    tokens = [without_padding(row, vocabulary.pad_id) for row in ids.reshape(-1, ids.shape[-1])]
    texts = [vocabulary.decode(row) for row in tokens]
    record = {"prediction": texts if several else texts[0]}
    return record | ({"prediction_tokens": tokens if several else tokens[0]} if output_ids else {})


def _of_example(values: Any, i: int) -> Any:
    """Return value i of every leaf; a leaf is a list or an array with a value for each example."""
    return jax.tree.map(lambda leaf: leaf[i], values, is_leaf=lambda node: isinstance(node, list | np.ndarray))


def _encode(record: Mapping[str, Any], encoder: type[json.JSONEncoder] | None) -> bytes:
    if encoder is None:
        return jsonl.encode(record)
    plain = json.dumps(record, cls=encoder, ensure_ascii=False)
    return (plain + "\n").encode("utf-8", "backslashreplace")
