"""`t5x infer --model`: predictions or scores for the lines of a file, given only a model directory."""

import collections
import hashlib
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x.errors import UserError
from t5x.inference.input_lines import Line, Lines
from t5x.inference.loaded import BATCH_SIZE, MAX_INPUT_LENGTH, MAX_LENGTH, LoadedModel, load
from t5x.inference.options import Decoding
from t5x.inference.output import Output, behind_finished, digest
from t5x.inference.shown import Shown
from t5x.partitioning import distributed
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

MODES = ("predict", "score")
BATCHES_A_CHUNK = 16


def infer_file(
    model_dir: str,
    input_path: str,
    output: str = "-",
    *,
    mode: str = "predict",
    max_length: int | None = None,
    max_input_length: int = MAX_INPUT_LENGTH,
    batch_size: int = BATCH_SIZE,
    checkpoint_period: int = BATCHES_A_CHUNK,
    num_shards: int = 1,
    shard_id: int = 0,
    output_ids: bool = False,
    overwrite: bool = False,
    long: str = "truncate",
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
      input_path: text (one input per line) or .jsonl (objects with `inputs` and, to score, `targets`); - is stdin.
      output: JSON lines, in the order of the input; - is stdout.
      mode: `predict` or `score`.
      max_length: maximum number of generated tokens (128); only for predictions.
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
    positive = {"max_length": max_length, "max_input_length": max_input_length, "batch_size": batch_size}
    for name, value in {**positive, "checkpoint_period": checkpoint_period, "num_shards": num_shards}.items():
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}: with --num_shards {num_shards} it must be 0 to {num_shards - 1}.")
    if mode not in MODES:
        raise UserError(f"--mode is {mode!r}: it must be one of {', '.join(MODES)}.")
    if long not in ("truncate", "error"):
        raise UserError(f"--long is {long!r}: it must be truncate or error.")
    if seed is not None and not 0 <= seed < 1 << 32:
        raise UserError(f"--seed is {seed}: it must be 0 to {(1 << 32) - 1}.")
    of_predictions = {"max_length": max_length, "seed": seed, "output_ids": output_ids or None, **decoding}
    if mode == "score" and (given := [f"--{name}" for name, value in of_predictions.items() if value is not None]):
        raise UserError(
            f"{', '.join(given)} goes with --mode predict; scores need no decoding. (Longer targets than "
            "--max_input_length are cut.)"
        )
    options = Decoding(**decoding)
    max_length, seed = MAX_LENGTH if max_length is None else max_length, seed or 0
    if num_shards > 1 and output != "-":
        output = f"{output}-{shard_id:05}-of-{num_shards:05}"
    to = Output(output, overwrite=overwrite, inputs={"input": input_path})
    lines = Lines(input_path, needs_targets=mode == "score")
    if lines.is_stream and (num_shards > 1 or jax.process_count() > 1):
        what = "--num_shards" if num_shards > 1 else "a run of several processes"
        raise UserError(f"{what} needs --input to be a file: a stream can be read only once.")
    total = lines.count()
    shard = range(0) if total is None else range(total * shard_id // num_shards, total * (shard_id + 1) // num_shards)
    if total is not None:
        log.info("%d input(s) from %s", len(shard), input_path)
    loaded = load(model_dir, vocabulary=vocabulary, dtype=dtype)
    if mode == "predict":
        options.decode_fn(loaded.model.output_vocabulary, max_length)  # fails on invalid options before any work
    run = _Run(loaded, lines, options, mode, max_length, max_input_length, batch_size, output_ids, long, seed)
    job = {
        **run.job(), "checkpoint_period": checkpoint_period, "num_shards": num_shards, "shard_id": shard_id,
        "input": input_path, "vocabulary": vocabulary,
    }  # fmt: skip
    stop = None if total is None else shard.stop
    parts = _cut(itertools.islice(lines, shard.start, stop), checkpoint_period * batch_size)
    with to:
        _compute(run, parts, shard.start, None if total is None else len(shard), to, job)
    run.tell_cut()


def _cut(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    while part := list(itertools.islice(lines, size)):
        yield part


def _compute(
    run: "_Run", parts: Iterator[list[Line]], first: int, total: int | None, output: Output, job: Mapping[str, Any]
) -> None:
    """Compute the chunks that are missing and merge all."""
    finished = output.begin(job)
    kept, parts = behind_finished(output, run.lines.path, parts, finished, first)
    for record in finished[:kept]:
        run.cut.update(record["cut"])
    before = sum(record["examples"] for record in finished[:kept])
    first += before
    few = total is not None and total <= run.batch_size
    quiet = few or (output.path == "-" and sys.stdout.isatty())
    with Shown(total, before, "input", run.mode, quiet=quiet) as shown:
        for number, part in enumerate(parts, start=kept):
            records, cut = run.compute(part, first, shown, is_first=number == 0)
            record = {"examples": len(part), "input": digest(part, first), "cut": cut}
            output.write(map(jsonl.encode, records), record)
            first += len(part)
    output.finish()


class _Run:
    """Predicts or scores lines.

    Attributes:
      cut: numbers of truncated `inputs` and `targets` so far, and of `scores` that are NaN.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        lines: Lines,
        options: Decoding,
        mode: str,
        max_length: int,
        max_input_length: int,
        batch_size: int,
        output_ids: bool,
        long: str,
        seed: int,
    ):
        self.loaded = loaded
        self.lines = lines
        self.mode = mode
        self.batch_size = batch_size
        self.cut: collections.Counter[str] = collections.Counter()
        self._options = options
        self._max_length = max_length
        self._max_input_length = max_input_length
        self._output_ids = output_ids
        self._long = long
        self._seed = seed

    def job(self) -> dict[str, Any]:
        """Return what the results depend on."""
        usual = vars(Decoding())
        decoding = {name: value for name, value in vars(self._options).items() if value != usual[name]}
        choices = decoding.pop("choices", None)
        if choices is not None:
            decoding["choices"] = hashlib.sha256(json.dumps(choices).encode()).hexdigest()
        return {
            **self.loaded.identity(), "mode": self.mode, "max_length": self._max_length,
            "max_input_length": self._max_input_length, "batch_size": self.batch_size, "long": self._long,
            "output_ids": self._output_ids, "seed": self._seed, "decoding": decoding,
        }  # fmt: skip

    def compute(
        self, part: Sequence[Line], first: int, shown: Shown, *, is_first: bool
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return a record for each line, and the numbers of truncated inputs and targets and of NaN scores.

        Args:
          first: index of the first line in the whole input.
          is_first: whether this is the first chunk; if it is short, it is the whole input.
        """
        before = self.cut.copy()
        inputs = [self._ids(line, "inputs") for line in part]
        rows = self.loaded.rows(len(part) if is_first else self.batch_size, self.batch_size)
        started = shown.done
        common = {
            "max_input_length": self._max_input_length, "batch_size": self.batch_size, "rows": rows,
            "after_batch": lambda done: shown.update(started + done),
        }  # fmt: skip
        if self.mode == "score":
            targets = [self._ids(line, "targets") for line in part]
            results = [{"score": score} for score in self.loaded.scores(inputs, targets, **common)]
        else:
            found = self.loaded.predictions(
                inputs, self._options, max_length=self._max_length, seed=self._seed,
                indices=range(first, first + len(part)), **common,
            )  # fmt: skip
            results = [self._prediction(generations) for generations in found]
        self.cut["scores"] += sum(bool(np.isnan(result["score"]).any()) for result in results)
        return [{**line.example, **r} for line, r in zip(part, results, strict=True)], dict(self.cut - before)

    def _prediction(self, generations: Sequence[Any]) -> dict[str, Any]:
        found = {"prediction": [g.text for g in generations], "score": [g.score for g in generations]}
        if self._output_ids:
            found["prediction_tokens"] = [g.tokens for g in generations]
        return found if self._options.num_return > 1 else {name: values[0] for name, values in found.items()}

    def _ids(self, line: Line, field: str) -> list[int]:
        limit, text = self._max_input_length, line.example[field]
        ids, length = self.loaded.input_ids(text, limit) if field == "inputs" else self.loaded.target_ids(text)
        if length > limit:
            if self._long == "error":
                raise UserError(
                    f"{self.lines.where(line.number)}: {field!r} has {length} tokens, more than {limit}. Raise "
                    "--max_input_length, or let it be cut: --long truncate."
                )
            self.cut[field] += 1
        return ids[:limit]  # a truncated target has no EOS, as it does not end there

    def tell_cut(self) -> None:
        if not distributed.is_leader():
            return
        of = f"longer than {self._max_input_length} tokens and were cut (--max_input_length)"
        if self.cut["inputs"]:
            log.warning("%d input(s) were %s", self.cut["inputs"], of)
        if self.cut["targets"]:
            log.warning("%d target(s) were %s: their scores are of their beginnings", self.cut["targets"], of)
        if self.cut["scores"]:
            log.warning(
                "%d result(s) mean nothing: their score is not a number. Are the model's weights whole, and not "
                "float16? `t5x inspect` shows them", self.cut["scores"]
            )  # fmt: skip
