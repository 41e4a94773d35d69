"""`t5x answer --input`: answer the questions of a file with the model of a directory."""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5x import metrics
from t5x._runtime.errors import UserError, located
from t5x.apps.answering.answer_options import AnswerOptions, QuestionFile
from t5x.apps.answering.answers import FIELDS, answer, windows_of
from t5x.apps.answering.squad import SquadDataSource, text_field
from t5x.data.data_description import DataDescription
from t5x.files import text_lines
from t5x.inference.input_lines import SPLIT, Line, Lines
from t5x.inference.jobs import JobProgress, LineChunk, LineJob, Record, check_counts, run_job
from t5x.inference.loaded import LoadedModel, load
from t5x.inference.output import FileOutput
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

BATCHES_A_CHUNK = 16


class QuestionLines(Lines):
    """The questions of a file, with all their fields.

    Args:
      path: JSON lines, - for standard input, or SQuAD's official .json.
      needs_id: whether every question must have an id.
    """

    def __init__(self, path: str, *, needs_id: bool):
        source = SquadDataSource({SPLIT: path}) if path.endswith(".json") else None
        data = DataDescription(inputs="{question}{context}")
        super().__init__(path, needs_targets=False, data=data, source=source)
        self._is_text = False
        self._needs_id = needs_id

    def __iter__(self) -> Iterator[Line]:
        numbers: dict[str, int] = {}
        for line in super().__iter__():
            if line is None:
                continue
            name = line.example.get("id")
            if name is not None and (first := numbers.setdefault(str(name), line.number)) != line.number:
                raise UserError(
                    f"{self.where(line.number)} has the same id, {name!r}, as line {first}. Ids must be unique."
                )
            yield line

    def _line(self, number: int, raw: bytes, example: dict[str, Any]) -> Line:
        for field in ("question", "context"):
            text_field(example, field, self.where(number))
        if clashing := [name for name in FIELDS if name in example]:
            raise UserError(
                f'{self.where(number)} has a field "{clashing[0]}", which the output uses for the answer. Rename it in '
                "the input."
            )
        if example.get("id") is None:
            if self._needs_id:
                raise UserError(f'{self.where(number)} has no "id", which SQuAD\'s files need.')
        elif not isinstance(example["id"], str | int):
            raise UserError(f'{self.where(number)}: "id" must be a string or an integer.')
        else:
            text_lines.check_unicode(str(example["id"]), f'{self.where(number)}: "id"')
        return super()._line(number, raw, example)


def answer_file(
    model_dir: str,
    files: QuestionFile,
    options: AnswerOptions,
    *,
    vocabulary: str | None = None,
    dtype: str | None = None,
) -> None:
    """Answer the questions of a file with the model of a checkpoint directory.

    An output line has the fields of its question, and `answer`, `score`, `start`, `end`, `no_answer` and, if the
    `no_answer` option is given, `no_answer_probability`; see `t5x.apps.answering.answers.Answer`. If the run is killed,
    the same command resumes after the last finished chunk, in `tmp-<output>/`; the output is the same.

    Args:
      model_dir: a checkpoint, or a MODEL_DIR.
      vocabulary, dtype: see `t5x.load`.
    """
    assert files.input is not None
    check_counts("--", checkpoint_period=files.checkpoint_period)
    paths = {"squad_predictions": files.squad_predictions, "squad_na_probs": files.squad_na_probs}
    extra = {name: path for name, path in paths.items() if path is not None}
    _check_extra(extra, files.output, options)
    to = FileOutput(files.output, overwrite=files.overwrite, also=extra, inputs={"input": files.input})
    questions = QuestionLines(files.input, needs_id=bool(extra))
    questions.count()  # checks every question, before the model is loaded
    loaded = load(model_dir, vocabulary=vocabulary, dtype=dtype)
    source = {"checkpoint_period": files.checkpoint_period, "input": files.input, "vocabulary": vocabulary}
    job = _FileAnswering(
        file=questions, batch_size=options.batch_size, source=source, loaded=loaded, settings=options,
        extra_files=extra,
    )  # fmt: skip
    run_job(job, to)


def _check_extra(extra: Mapping[str, str], output: str, settings: AnswerOptions) -> None:
    """Raise a UserError if the options for SQuAD's files do not fit the other options."""
    if extra and output == "-":
        raise UserError(f"--{next(iter(extra))} needs --output FILE too: it is made from that file.")
    if "squad_na_probs" in extra and settings.no_answer is None:
        raise UserError("--squad_na_probs needs --no_answer, the text that the model generates if there is no answer.")
    paths = [os.path.abspath(path) for path in (output, *extra.values())]
    if len({*paths}) < len(paths):
        raise UserError("--output, --squad_predictions and --squad_na_probs must be different files.")


@dataclasses.dataclass(kw_only=True)
class _FileAnswering(LineJob):
    """Answers the questions of a file.

    Args:
      extra_files: {option: path} of SQuAD's files.
    """

    description: str = "answer"
    unit: str = "question"
    counted: str = "questions"
    loaded: LoadedModel
    settings: AnswerOptions
    extra_files: dict[str, str]

    def identity(self) -> dict[str, Any]:
        return {**self.loaded.identity(), "mode": "answer", **dataclasses.asdict(self.settings), **self.source}

    def compute_lines(self, chunk: LineChunk, progress: JobProgress) -> tuple[list[Record], Record]:
        pairs = [(line.example["question"], line.example["context"]) for line in chunk.lines]
        spans = []
        for line, pair in zip(chunk.lines, pairs, strict=True):
            with located(self.file.where(line.number)):
                spans.append(windows_of(self.loaded, *pair, self.settings))
        windows = sum(map(len, spans))
        rows = self.loaded.rows(windows if chunk.is_first else self.batch_size, self.batch_size)
        after_batch = progress.after_batch(len(pairs), windows)
        answers = answer(self.loaded, pairs, spans, self.settings, rows=rows, after_batch=after_batch)
        return [{**line.example, **each.as_record()} for line, each in zip(chunk.lines, answers, strict=True)], {}

    def after_merge(self, path: str) -> None:
        """Write SQuAD's files from the complete output, and log scores if the correct answers are known."""
        for name, field in (("squad_predictions", "answer"), ("squad_na_probs", "no_answer_probability")):
            if name in self.extra_files:
                values = {str(record["id"]): record[field] for record, _ in jsonl.read(path)}
                content = json.dumps(values, ensure_ascii=False, indent=0) + "\n"
                jsonl.replace(self.extra_files[name], [content.encode()])
                log.info("wrote %s", self.extra_files[name])
        if self.file.path.endswith(".json"):
            records = [record for record, _ in jsonl.read(path)]
            if any(record["answers"] for record in records):
                scores = ", ".join(f"{name} {value:.4g}" for name, value in _scores(records).items())
                log.info("%s (%d questions)", scores, len(records))


def _scores(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return SQuAD's metrics of the output lines; those of 2.0 if some questions have no answer."""
    golds, texts = ([record[field] for record in records] for field in ("answers", "answer"))
    if all(golds):
        return metrics.squad(golds, texts)
    probabilities = [record.get("no_answer_probability") for record in records]
    return metrics.squad_v2(golds, texts, None if None in probabilities else probabilities)
