"""`t5x answer --input`: answers to the questions of a file, given only a model directory."""

import dataclasses
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from t5x import metrics
from t5x.answering.answers import FIELDS, Answer, Answering, answer, windows_of
from t5x.answering.questions import QuestionLines, SquadQuestions, open_questions
from t5x.errors import UserError
from t5x.inference.input_lines import Line
from t5x.inference.loaded import LoadedModel, load
from t5x.inference.output import Output, behind_finished, digest
from t5x.inference.shown import Shown
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

BATCHES_A_CHUNK = 16


def answer_file(
    model_dir: str,
    input_path: str,
    output: str = "-",
    *,
    squad_predictions: str | None = None,
    squad_na_probs: str | None = None,
    checkpoint_period: int = BATCHES_A_CHUNK,
    overwrite: bool = False,
    vocabulary: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> None:
    """Answer the questions of a file with the model of a checkpoint directory.

    An output line has the fields of its question, and `answer`, `score`, `start`, `end`, `no_answer` and, if the
    `no_answer` option is given, `no_answer_probability`; see `t5x.answering.answers.Answer`. If the run is killed, the
    same command resumes after the last finished chunk, in `tmp-<output>/`; the output is the same.

    Args:
      model_dir: a checkpoint, or a MODEL_DIR.
      input_path: JSON lines with `question`, `context` and optionally `id`; - is stdin; or SQuAD's official .json,
        whose answers are then scored.
      output: JSON lines, in the order of the input; - is stdout.
      squad_predictions: also write {id: answer} to this file, as SQuAD's evaluation scripts read it.
      squad_na_probs: also write {id: no_answer_probability} to this file.
      checkpoint_period: number of batches of questions per chunk.
      overwrite: replace an existing output, and discard finished chunks of other runs.
      vocabulary, dtype: see `t5x.load`.
      options: see `t5x.answering.answers.Answering`.
    """
    how = Answering(**options)
    if checkpoint_period < 1:
        raise UserError(f"--checkpoint_period is {checkpoint_period}: it must be at least 1.")
    extra = {"squad_predictions": squad_predictions, "squad_na_probs": squad_na_probs}
    extra = {name: path for name, path in extra.items() if path is not None}
    _check_extra(extra, output, how)
    to = Output(output, overwrite=overwrite, also=extra, inputs={"input": input_path})
    questions = open_questions(input_path, needs_id=bool(extra))
    if questions.is_stream and jax.process_count() > 1:
        raise UserError("A run of several processes needs --input to be a file: a stream can be read only once.")
    total = questions.count()
    if total is not None:
        log.info("%d question(s) from %s", total, input_path)
    run = _Run(load(model_dir, vocabulary=vocabulary, dtype=dtype), questions, how)
    lines = iter(questions)
    size = checkpoint_period * how.batch_size
    parts = iter(lambda: list(itertools.islice(lines, size)), [])
    job = {**run.job(), "checkpoint_period": checkpoint_period, "input": input_path, "vocabulary": vocabulary}
    with to:
        _compute(run, parts, total, to, job)
        to.finish(lambda: _finish(output, questions, **extra))


def _check_extra(extra: Mapping[str, str], output: str, how: Answering) -> None:
    """Raise a UserError if the options for SQuAD's files do not fit the other options."""
    if extra and output == "-":
        raise UserError(f"--{next(iter(extra))} needs --output FILE too: it is made of it.")
    if "squad_na_probs" in extra and how.no_answer is None:
        raise UserError("--squad_na_probs needs --no_answer, the text that the model writes without an answer.")
    paths = [os.path.abspath(path) for path in (output, *extra.values())]
    if len({*paths}) < len(paths):
        raise UserError("--output, --squad_predictions and --squad_na_probs must be different files.")


def _compute(
    run: "_Run", parts: Iterator[list[Line]], total: int | None, output: Output, job: Mapping[str, Any]
) -> None:
    """Compute the chunks that are missing."""
    finished = output.begin(job)
    kept, parts = behind_finished(output, run.questions.path, parts, finished, 0)
    done = sum(record["questions"] for record in finished[:kept])
    few = total is not None and total <= run.batch_size
    quiet = few or (output.path == "-" and sys.stdout.isatty())
    with Shown(total, done, "question", "answer", quiet=quiet) as shown:
        for number, part in enumerate(parts, start=kept):
            records = run.compute(part, shown, is_first=number == 0)
            output.write(map(jsonl.encode, records), {"questions": len(part), "input": digest(part, done)})
            done += len(part)


class _Run:
    """Answers the questions of a file."""

    def __init__(self, loaded: LoadedModel, questions: QuestionLines | SquadQuestions, how: Answering):
        self.questions = questions
        self.batch_size = how.batch_size
        self._loaded = loaded
        self._how = how

    def job(self) -> dict[str, Any]:
        """Return what the results depend on."""
        return {**self._loaded.identity(), "mode": "answer", **dataclasses.asdict(self._how)}

    def compute(self, part: Sequence[Line], shown: Shown, *, is_first: bool) -> list[dict[str, Any]]:
        """Return a record for each question.

        Args:
          is_first: whether this is the first chunk; if it is short, it is the whole input.
        """
        pairs = [(line.example["question"], line.example["context"]) for line in part]
        pieces = []
        for line, pair in zip(part, pairs, strict=True):
            try:
                pieces.append(windows_of(self._loaded, *pair, self._how))
            except UserError as error:
                raise UserError(f"{self.questions.where(line.number)}: {error}") from error
        total, before = sum(map(len, pieces)), shown.done
        found = answer(
            self._loaded,
            pairs,
            pieces,
            self._how,
            rows=self._loaded.rows(total if is_first else self.batch_size, self.batch_size),
            after_batch=lambda done: shown.update(before + done * len(part) // total),
        )
        return [{**line.example, **as_record(one)} for line, one in zip(part, found, strict=True)]


def as_record(found: Answer) -> dict[str, Any]:
    """Return an answer in the form in which it is written."""
    record = dict(zip(FIELDS, found, strict=True))
    if found.no_answer_probability is None:
        del record["no_answer_probability"]
    return record


def _finish(
    output: str,
    questions: QuestionLines | SquadQuestions,
    squad_predictions: str | None = None,
    squad_na_probs: str | None = None,
) -> None:
    """Write SQuAD's files from the complete output, and log scores if the correct answers are known."""
    for path, field in ((squad_predictions, "answer"), (squad_na_probs, "no_answer_probability")):
        if path is not None:
            found = {str(record["id"]): record[field] for record, _ in jsonl.read(output)}
            jsonl.replace(path, [json.dumps(found, ensure_ascii=False, indent=0).encode(), b"\n"])
            log.info("wrote %s", path)
    if isinstance(questions, SquadQuestions):
        records = [record for record, _ in jsonl.read(output)]
        if any(record["answers"] for record in records):
            figures = ", ".join(f"{name} {value:.4g}" for name, value in _scores(records).items())
            log.info("%s (%d questions)", figures, len(records))


def _scores(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return SQuAD's metrics of the output lines; those of 2.0 if some questions have no answer."""
    golds, texts = ([record[field] for record in records] for field in ("answers", "answer"))
    if all(golds):
        return metrics.squad(golds, texts)
    probabilities = [record.get("no_answer_probability") for record in records]
    return metrics.squad_v2(golds, texts, None if None in probabilities else probabilities)
