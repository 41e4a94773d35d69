"""`t5x infer --model`: predictions or scores for the lines of a file, given only a model directory."""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.data_description import DataDescription
from t5x.inference.generation import Generation
from t5x.inference.input_lines import Line, Lines
from t5x.inference.jobs import JobProgress, LineChunk, LineJob, Record, Shard, check_counts, run_job
from t5x.inference.loaded import BATCH_SIZE, LoadedModel, load
from t5x.inference.options import Decoding
from t5x.inference.output import FileOutput
from t5x.partitioning import distributed

log = logging.getLogger(__name__)

BATCHES_A_CHUNK = 16


def infer_file(
    model_dir: str,
    input_path: str,
    output: str = "-",
    *,
    mode: Literal["predict", "score"] = "predict",
    inputs: str | None = None,
    targets: str | None = None,
    prefix: str | None = None,
    columns: Sequence[str] | None = None,
    max_length: int | None = None,
    max_input_length: int | None = None,
    batch_size: int = BATCH_SIZE,
    checkpoint_period: int = BATCHES_A_CHUNK,
    num_shards: int = 1,
    shard_id: int = 0,
    output_ids: bool = False,
    overwrite: bool = False,
    long: Literal["truncate", "error"] = "truncate",
    vocabulary: str | None = None,
    dtype: str | None = None,
    seed: int | None = None,
    **decoding: Any,
) -> None:
    """Predict or score the lines of a file with the model of a checkpoint directory.

    An output line has the fields of its input, and `prediction` and `score`, or only `score`. If the run is killed, the
    same command resumes after the last finished chunk, in `tmp-<output>/`; the output is the same.

    Args:
      model_dir: a checkpoint, or a MODEL_DIR.
      input_path: text (one input per line), .jsonl, .tsv, .csv or .parquet; - is stdin.
      output: JSON lines, in the order of the input; - is stdout.
      mode: `predict` or `score`.
      inputs, targets, prefix, columns: see `t5x.data.data_description.DataDescription`. By default, as the model was
        trained.
      max_length: maximum number of generated tokens (by default as in training, or 128); only for predictions.
      max_input_length: longer inputs are truncated and counted in a warning. So are targets to score: a truncated
        target has no EOS, and its score is that of its beginning.
      batch_size: inputs per batch.
      checkpoint_period: number of batches per chunk.
      num_shards, shard_id: which of `num_shards` parts of the input to process, from 0. The output is then
        `<output>-<shard>-of-<shards>`; concatenated in order, the parts are the complete output.
      output_ids: also write `prediction_tokens`.
      overwrite: replace an existing output, and discard finished chunks of other runs.
      long: `error` refuses inputs and targets that are too long.
      vocabulary, dtype: see `t5x.load`.
      seed: seed of samples (0). An input gets the same sample for any batch size and number of shards.
      decoding: see `t5x.inference.options.Decoding`.
    """
    check_counts(
        "--", max_length=max_length, max_input_length=max_input_length, batch_size=batch_size,
        checkpoint_period=checkpoint_period, num_shards=num_shards, shard_id=shard_id,
    )  # fmt: skip
    if seed is not None and not 0 <= seed < 1 << 32:
        raise UserError(f"--seed is {seed}: it must be 0 to {(1 << 32) - 1}.")
    for_predictions = {"max_length": max_length, "seed": seed, "output_ids": output_ids or None, **decoding}
    if mode == "score" and (flags := [f"--{name}" for name, value in for_predictions.items() if value is not None]):
        raise UserError(
            f"{', '.join(flags)} cannot be combined with --mode score, which decodes nothing. (Targets are truncated "
            "to --max_input_length.)"
        )
    options, shard = Decoding(**decoding), Shard(shard_id, num_shards)
    to = FileOutput(shard.path(output), overwrite=overwrite, inputs={"input": input_path})
    loaded = load(model_dir, vocabulary=vocabulary, dtype=dtype)
    data = DataDescription.of_checkpoint(
        loaded.source.data, loaded.source.path, inputs=inputs, targets=targets, prefix=prefix, columns=columns,
        max_input_length=max_input_length, max_target_length=max_length,
    )  # fmt: skip
    if data.fields():
        log.info("inputs: %r (--inputs and --prefix change it)", data.template())
    max_input_length, max_length = data.max_input_length, data.max_target_length
    lines = Lines(input_path, needs_targets=mode == "score", data=data, live=to.is_stdout)
    if mode == "predict":
        options.decode_fn(loaded.model.output_vocabulary, max_length)  # fails on invalid options
    source = {
        "checkpoint_period": checkpoint_period, "num_shards": num_shards, "shard_id": shard_id, "input": input_path,
        "vocabulary": vocabulary, **data.fields(),
    }  # fmt: skip
    job = _FileInference(
        file=lines, shard=shard, batch_size=batch_size, source=source, loaded=loaded, decoding=options, mode=mode,
        max_length=max_length, max_input_length=max_input_length, long=long, output_ids=output_ids, seed=seed or 0,
    )  # fmt: skip
    records = run_job(job, to)
    if distributed.is_leader():
        _log_problems(sum((Counter(record["cut"]) for record in records), Counter()), max_input_length)


_SETTINGS = ("mode", "max_length", "max_input_length", "batch_size", "long", "output_ids", "seed")


@dataclasses.dataclass(kw_only=True)
class _FileInference(LineJob):
    """Predicts or scores lines. See `infer_file` for the settings.

    The record of a chunk has in `cut` the numbers of truncated `inputs` and `targets`, and of `scores` that are NaN.
    """

    unit: str = "input"
    file: Lines
    loaded: LoadedModel
    decoding: Decoding
    mode: str
    max_length: int
    max_input_length: int
    long: str
    output_ids: bool
    seed: int

    def __post_init__(self):
        super().__post_init__()
        self.description = self.mode

    def identity(self) -> dict[str, Any]:
        defaults = vars(Decoding())
        decoding = {name: value for name, value in vars(self.decoding).items() if value != defaults[name]}
        if "choices" in decoding:
            decoding["choices"] = hashlib.sha256(json.dumps(decoding.pop("choices")).encode()).hexdigest()
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {**self.loaded.identity(), **settings, "decoding": decoding, **self.source}

    def compute_lines(self, chunk: LineChunk, progress: JobProgress) -> tuple[list[Record], Record]:
        count = len(chunk.lines)
        problems: Counter[str] = Counter()
        inputs = [self._ids(line, "inputs", problems) for line in chunk.lines]
        common: dict[str, Any] = {
            "max_input_length": self.max_input_length, "batch_size": self.batch_size,
            "after_batch": progress.after_batch(),
        }  # fmt: skip
        if not self.file.live:
            common["rows"] = self.loaded.rows(count if chunk.is_first else self.batch_size, self.batch_size)
        if self.mode == "score":
            targets = [self._ids(line, "targets", problems) for line in chunk.lines]
            results = [{"score": score} for score in self.loaded.scores(inputs, targets, **common)]
        else:
            indices = range(chunk.first, chunk.first + count)
            predictions = self.loaded.predictions(
                inputs, self.decoding, max_length=self.max_length, seed=self.seed, indices=indices, **common
            )
            results = [self._prediction(generations) for generations in predictions]
        problems["scores"] += sum(bool(np.isnan(result["score"]).any()) for result in results)
        records: list[Record] = [{**line.example, **result} for line, result in zip(chunk.lines, results, strict=True)]
        return records, {"cut": dict(+problems)}

    def _prediction(self, generations: Sequence[Generation]) -> dict[str, Any]:
        fields: dict[str, list[Any]] = {
            "prediction": [g.text for g in generations], "score": [g.score for g in generations],
        }  # fmt: skip
        if self.output_ids:
            fields["prediction_tokens"] = [g.tokens for g in generations]
        return fields if self.decoding.num_return > 1 else {name: values[0] for name, values in fields.items()}

    def _ids(self, line: Line, field: str, problems: Counter[str]) -> list[int]:
        limit, text = self.max_input_length, getattr(line, field)
        ids, length = self.loaded.input_ids(text, limit) if field == "inputs" else self.loaded.target_ids(text)
        if length > limit:
            if self.long == "error":
                raise UserError(
                    f"{self.file.where(line.number)}: {field!r} has {length} tokens, more than {limit}. Raise "
                    "--max_input_length, or pass --long truncate."
                )
            problems[field] += 1
        return ids[:limit]  # a truncated target has no EOS, as it does not end there


def _log_problems(problems: Counter[str], max_input_length: int) -> None:
    truncated = f"longer than {max_input_length} tokens and were truncated (--max_input_length)"
    if problems["inputs"]:
        log.warning("%d input(s) were %s", problems["inputs"], truncated)
    if problems["targets"]:
        log.warning("%d target(s) were %s; their scores are those of the beginning", problems["targets"], truncated)
    if problems["scores"]:
        log.warning(
            "%d result(s) are meaningless: their score is NaN. Check the weights with `t5x inspect`: they may be "
            "damaged or float16", problems["scores"],
        )  # fmt: skip
