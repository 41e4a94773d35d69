"""`t5x infer --model`: predictions or scores for the lines of a file, with the model of a directory alone."""

import hashlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from t5x.checkpoints import agreement
from t5x.errors import UserError
from t5x.inference import chunks as chunks_lib
from t5x.inference.chunks import Chunks
from t5x.inference.lines import Line, Lines
from t5x.inference.loaded import BATCH_SIZE, MAX_INPUT_LENGTH, MAX_LENGTH, LoadedModel, load
from t5x.inference.options import Decoding
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
    max_length: int = MAX_LENGTH,
    max_input_length: int = MAX_INPUT_LENGTH,
    batch_size: int = BATCH_SIZE,
    checkpoint_period: int = BATCHES_A_CHUNK,
    num_shards: int = 1,
    shard_id: int = 0,
    output_ids: bool = False,
    overwrite: bool = False,
    long: str = "truncate",
    vocabulary: str | None = None,
    seed: int = 0,
    **decoding: Any,
) -> None:
    """Predicts or scores the lines of a file with the model of a checkpoint directory.

    A line of the output has what its input had, and `prediction` and `score`, or `score`. Killed and started again, it
    goes on behind the last chunk that was finished, in `tmp-<output>/`; the output is the same.

    Args:
      model_dir: a checkpoint, or a MODEL_DIR.
      input_path: text (a line an input) or .jsonl (objects with `inputs` and, to score, `targets`); - is stdin.
      output: JSON lines, in the order of the input; - is stdout.
      max_length: tokens generated at most.
      max_input_length: longer inputs are cut, and counted in a warning; so are targets to score.
      checkpoint_period: batches in a chunk.
      num_shards, shard_id: which of so many parts of the input this is, from 0. The output is then
        `<output>-<shard>-of-<shards>`; all of them one after the other are the whole.
      output_ids: also write `prediction_tokens`.
      overwrite: replace an output that exists.
      long: `error` refuses inputs that are too long.
      vocabulary: see `t5x.load`.
      seed: of samples. An input gets the same sample whatever the batch size or the shards.
      decoding: see `t5x.inference.options.Decoding`.
    """
    positive = {"max_length": max_length, "max_input_length": max_input_length, "batch_size": batch_size}
    for name, value in {**positive, "checkpoint_period": checkpoint_period, "num_shards": num_shards}.items():
        if value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise UserError(f"--shard_id is {shard_id}: with --num_shards {num_shards} it must be 0 to {num_shards - 1}.")
    if mode not in MODES:
        raise UserError(f"--mode is {mode!r}: it must be one of {', '.join(MODES)}.")
    if long not in ("truncate", "error"):
        raise UserError(f"--long is {long!r}: it must be truncate or error.")
    if not 0 <= seed < 1 << 32:
        raise UserError(f"--seed is {seed}: it must be 0 to {(1 << 32) - 1}.")
    if mode == "score" and (decoding or output_ids):
        given = ", ".join(f"--{name}" for name in [*decoding, *(["output_ids"] if output_ids else [])])
        raise UserError(f"{given} goes with --mode predict; scores need no decoding.")
    options = Decoding(**decoding)
    if num_shards > 1 and output != "-":
        output = f"{output}-{shard_id:05}-of-{num_shards:05}"
    directory = None if output == "-" else _check_output(output, overwrite)
    lines = Lines(input_path, needs_targets=mode == "score")
    if lines.is_stream and (num_shards > 1 or jax.process_count() > 1):
        what = "--num_shards" if num_shards > 1 else "a run of several processes"
        raise UserError(f"{what} needs --input to be a file: a stream can be read only once.")
    total = lines.count()
    shard = range(0) if total is None else range(total * shard_id // num_shards, total * (shard_id + 1) // num_shards)
    if total is not None:
        log.info("%d input(s) from %s", len(shard), input_path)
    loaded = load(model_dir, vocabulary=vocabulary)
    run = _Run(loaded, lines, options, mode, max_length, max_input_length, batch_size, output_ids, long, seed)
    job = {
        **run.job(), "checkpoint_period": checkpoint_period, "num_shards": num_shards, "shard_id": shard_id,
        "input": input_path, "vocabulary": vocabulary,
    }  # fmt: skip
    stop = None if total is None else shard.stop
    parts = _cut(itertools.islice(lines, shard.start, stop), checkpoint_period * batch_size)
    count = None if total is None else len(shard)
    if output == "-":
        _to_stdout(run, parts, shard.start, count)
    else:
        _to_file(run, parts, shard.start, count, output, directory, job, overwrite)
    run.tell_cut()


def _check_output(output: str, overwrite: bool) -> str:
    """The directory for its chunks."""
    if os.path.isdir(output):
        raise UserError(f"--output {output} is a directory; name a file.")
    parent, name = os.path.split(os.path.abspath(output))
    if not os.path.isdir(parent):
        raise UserError(f"--output {output}: there is no directory {parent}.")
    directory = os.path.join(parent, f"tmp-{name}")
    if os.path.exists(output) and not overwrite and not os.path.isdir(directory):
        raise _exists(output)
    return directory


def _exists(output: str) -> UserError:
    return UserError(f"{output} exists already; give another --output, or --overwrite to replace it.")


def _cut(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    while part := list(itertools.islice(lines, size)):
        yield part


def _to_stdout(run: "_Run", parts: Iterator[list[Line]], first: int, total: int | None) -> None:
    quiet = sys.stdout.isatty() or (total is not None and total <= run.batch_size)
    with Shown(total, 0, "input", run.mode, quiet=quiet) as shown:
        try:
            for number, part in enumerate(parts):
                records, _ = run.compute(part, first, shown, is_first=number == 0)
                first += len(part)
                if distributed.is_leader():
                    sys.stdout.buffer.writelines(map(jsonl.encode, records))
                    sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise jsonl.write_error("standard output", error) from error


def _to_file(
    run: "_Run",
    parts: Iterator[list[Line]],
    first: int,
    total: int | None,
    output: str,
    directory: str,
    job: Mapping[str, Any],
    overwrite: bool,
) -> None:
    chunks: Chunks | None = None

    def begin() -> dict[str, Any]:
        nonlocal chunks
        there = os.path.exists(output) and not overwrite
        chunks = Chunks(
            directory, os.path.basename(output), job, start_anew=overwrite,
            mend=f"give --overwrite, or remove {directory}",
        )  # fmt: skip
        # Ended between its last two steps, a run has left its output and its chunks.
        merged = there and chunks.finished and sum(r["size"] for r in chunks.finished) == os.path.getsize(output)
        if there and not merged:
            chunks.close()
            raise _exists(output)
        return {"finished": chunks.finished, "merged": bool(merged)}

    told = agreement.decide("inference/begin", begin)
    finished = told["finished"]
    if finished:
        log.info("going on behind %d finished chunk(s) of %s", len(finished), directory)
    try:
        quiet = total is not None and total <= run.batch_size
        before = sum(record["examples"] for record in finished)
        with Shown(total, before, "input", run.mode, quiet=quiet) as shown:
            for number, part in enumerate(() if told["merged"] else parts):
                digest = hashlib.sha256(b"".join(line.raw for line in part)).hexdigest()
                if number < len(finished):
                    if finished[number]["input"] != digest:
                        raise UserError(
                            f"{run.lines.path} has changed: lines {part[0].number} to {part[-1].number} are not those "
                            f"that {directory} has results of. Give --overwrite to start anew."
                        )
                    run.cut += finished[number]["cut"]
                else:
                    records, cut = run.compute(part, first, shown, is_first=number == 0)
                    record = {"examples": len(part), "input": digest, "cut": cut}
                    if chunks is not None:
                        chunks.write(lambda path, records=records: _write(path, records), record)
                first += len(part)
        if chunks is not None:
            if not told["merged"]:
                chunks_lib.merge(output, [chunks.path(i) for i in range(len(chunks.finished))])
            chunks.remove()
            log.info("wrote %s", output)
    except (KeyboardInterrupt, SystemExit):
        if chunks is not None:
            log.info(
                "%d chunk(s) are finished, in %s: the same command goes on behind them", len(chunks.finished), directory
            )
        raise
    finally:
        if chunks is not None:
            chunks.close()


def _write(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "wb") as file:
        file.writelines(map(jsonl.encode, records))


class _Run:
    """What is done with the lines.

    Attributes:
      cut: how many texts were too long so far.
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
        self.cut = 0
        self._options = options
        self._max_length = max_length
        self._max_input_length = max_input_length
        self._output_ids = output_ids
        self._refuse_long = long == "error"
        self._seed = seed

    def job(self) -> dict[str, Any]:
        """What the results depend on."""
        source = self.loaded.source
        decoding = {name: value for name, value in vars(self._options).items() if value}
        choices = decoding.pop("choices", None)
        if choices is not None:
            decoding["choices"] = hashlib.sha256(json.dumps(choices).encode()).hexdigest()
        return {
            "model": os.path.abspath(source.path) if "://" not in source.path else source.path, "step": source.step,
            "mode": self.mode, "max_length": self._max_length, "max_input_length": self._max_input_length,
            "batch_size": self.batch_size, "output_ids": self._output_ids, "seed": self._seed, "decoding": decoding,
        }  # fmt: skip

    def compute(
        self, part: Sequence[Line], first: int, shown: Shown, *, is_first: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """(a record for each line, how many texts were cut).

        Args:
          first: index of the first line in the whole input.
          is_first: nothing was before it; where it is short, it is all there is.
        """
        before = self.cut
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
        return [{**line.example, **r} for line, r in zip(part, results, strict=True)], self.cut - before

    def _prediction(self, generations: Sequence[Any]) -> dict[str, Any]:
        found = {"prediction": [g.text for g in generations], "score": [g.score for g in generations]}
        if self._output_ids:
            found["prediction_tokens"] = [g.tokens for g in generations]
        return found if self._options.num_return > 1 else {name: values[0] for name, values in found.items()}

    def _ids(self, line: Line, field: str) -> list[int]:
        of = self.loaded.input_ids if field == "inputs" else self.loaded.target_ids
        ids, length = of(line.example[field], self._max_input_length)
        if length > self._max_input_length:
            if self._refuse_long:
                raise UserError(
                    f"{self.lines.where(line.number)}: {field!r} has {length} tokens, more than "
                    f"{self._max_input_length}. Raise --max_input_length, or let it be cut: --long truncate."
                )
            self.cut += 1
        return ids

    def tell_cut(self) -> None:
        if self.cut and distributed.is_leader():
            log.warning(
                "%d text(s) were longer than %d tokens and were cut (--max_input_length)",
                self.cut, self._max_input_length,
            )  # fmt: skip
