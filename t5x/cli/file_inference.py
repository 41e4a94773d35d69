"""`t5x infer --model`: predictions or scores for the lines of a file, given only a model directory."""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.cli.file_options import FileInference
from t5x.inference.generation import Decoding, Generation
from t5x.inference.input_lines import Line, Lines, read_texts
from t5x.inference.jobs import JobProgress, LineChunk, LineJob, Record, Shard, check_counts, run_job
from t5x.inference.loaded import LoadedModel, load
from t5x.inference.output import FileOutput
from t5x.partitioning import distributed

log = logging.getLogger(__name__)


def infer_file(run: FileInference) -> None:
    """Predict or score the lines of a file with the model of a checkpoint directory.

    An output line has the fields of its input, and `prediction` and `score`, or only `score`. If the run is killed, the
    same command resumes after the last finished chunk, in `tmp-<output>/`; the output is the same.

    A target to score that is longer than `max_input_length` is truncated too. It then has no EOS, and its score is that
    of its beginning. With `num_shards`, the output is `<output>-<shard>-of-<shards>`; concatenated in order, the parts
    are the complete output. An input gets the same sample for any batch size and number of shards.
    """
    check_counts(
        "--", max_length=run.max_target_length, max_input_length=run.max_input_length, batch_size=run.batch_size,
        checkpoint_period=run.checkpoint_period, num_shards=run.num_shards, shard_id=run.shard_id,
    )  # fmt: skip
    if run.seed is not None and not 0 <= run.seed < 1 << 32:
        raise UserError(f"--seed is {run.seed}: it must be 0 to {(1 << 32) - 1}.")
    decoding = run.passed_decoding()
    for_predictions = {"max_length": run.max_target_length, "output_ids": run.output_ids or None, **decoding}
    if run.mode == "score" and (flags := [f"--{name}" for name, value in for_predictions.items() if value is not None]):
        raise UserError(
            f"{', '.join(flags)} cannot be combined with --mode score, which decodes nothing. (Targets are truncated "
            "to --max_input_length.)"
        )
    seed = decoding.pop("seed", 0)
    if "choices" in decoding:
        decoding["choices"] = read_texts(decoding["choices"], "--choices")
    options, shard = Decoding(**decoding), Shard(run.shard_id, run.num_shards)
    to = FileOutput(shard.path(run.output), overwrite=run.overwrite, inputs={"input": run.input})
    loaded = load(run.model, vocabulary=run.vocabulary, dtype=run.dtype)
    data = run.description(loaded.source.data, loaded.source.path)
    if data.fields():
        log.info("inputs: %r (--inputs and --prefix change it)", data.template())
    lines = Lines(run.input, needs_targets=run.mode == "score", data=data, live=to.is_stdout)
    if run.mode == "predict":
        options.decode_fn(loaded.model.output_vocabulary, data.max_target_length)  # fails on invalid options
    source = {
        "checkpoint_period": run.checkpoint_period, "num_shards": run.num_shards, "shard_id": run.shard_id,
        "input": run.input, "vocabulary": run.vocabulary, **data.fields(),
    }  # fmt: skip
    job = _FileInference(
        description=run.mode, file=lines, shard=shard, batch_size=run.batch_size, source=source, run=run, loaded=loaded,
        decoding=options, seed=seed, max_length=data.max_target_length, max_input_length=data.max_input_length,
    )  # fmt: skip
    records = run_job(job, to)
    if distributed.is_leader():
        _log_problems(sum((Counter(record["cut"]) for record in records), Counter()), data.max_input_length)


@dataclasses.dataclass(kw_only=True)
class _FileInference(LineJob):
    """Predicts or scores lines.

    The record of a chunk has in `cut` the numbers of truncated `inputs` and `targets`, and of `scores` that are NaN.
    """

    description: str
    unit: str = "input"
    run: FileInference
    loaded: LoadedModel
    decoding: Decoding
    seed: int
    max_length: int
    max_input_length: int

    def identity(self) -> dict[str, Any]:
        defaults = vars(Decoding())
        decoding = {name: value for name, value in vars(self.decoding).items() if value != defaults[name]}
        if "choices" in decoding:
            decoding["choices"] = hashlib.sha256(json.dumps(decoding.pop("choices")).encode()).hexdigest()
        return {
            **self.loaded.identity(), "mode": self.run.mode, "max_length": self.max_length,
            "max_input_length": self.max_input_length, "batch_size": self.batch_size, "long": self.run.long,
            "output_ids": self.run.output_ids, "seed": self.seed, "decoding": decoding, **self.source,
        }  # fmt: skip

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
        if self.run.mode == "score":
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
        if self.run.output_ids:
            fields["prediction_tokens"] = [g.tokens for g in generations]
        return fields if self.decoding.num_return > 1 else {name: values[0] for name, values in fields.items()}

    def _ids(self, line: Line, field: str, problems: Counter[str]) -> list[int]:
        limit, text = self.max_input_length, getattr(line, field)
        ids, length = self.loaded.input_ids(text, limit) if field == "inputs" else self.loaded.target_ids(text)
        if length > limit:
            if self.run.long == "error":
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
