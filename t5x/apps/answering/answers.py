"""Answer questions about contexts with a loaded model: in Python, and those of a file, `t5x answer --input`.

A context that does not fit into the input is read in overlapping windows, and the question is asked for each. The
window with the best score among those with an answer wins; the question has no answer only if no window has one.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from t5x import metrics
from t5x._runtime.errors import UserError, located
from t5x.apps.answering.answer_options import AnswerOptions, QuestionFile
from t5x.apps.answering.question_tasks import SquadDataSource, check_no_answer, is_no_answer, prompt, text_field
from t5x.apps.answering.spans import Span, has_unknown, locate, windows
from t5x.data.data_description import DataDescription
from t5x.files import user_files
from t5x.inference.generation import Decoding, Generation, check_arguments
from t5x.inference.input_lines import SPLIT, Line, Lines
from t5x.inference.jobs import JobProgress, LineChunk, LineJob, Record, check_counts, run_job
from t5x.inference.loaded import LoadedModel, load
from t5x.inference.output import FileOutput
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """The answer to a question about a context.

    Attributes:
      text: what the model generated. Characters unknown to its vocabulary are taken from the context if they can be
        identified. Empty if the model generated the no-answer text.
      score: log probability of the generated text; with beams, divided by the length penalty.
      start, end: context[start:end] is the answer; None if it was not found there.
      no_answer: whether the model generated the no-answer text, or nothing.
      no_answer_probability: probability of the no-answer text; of several windows the smallest. None if `no_answer` was
        not given.
    """

    text: str
    score: float
    start: int | None
    end: int | None
    no_answer: bool
    no_answer_probability: float | None

    def as_record(self) -> dict[str, Any]:
        """Return the fields of an answer in an output line."""
        record = dict(zip(FIELDS, self, strict=True))
        if self.no_answer_probability is None:
            del record["no_answer_probability"]
        return record


FIELDS = ("answer", *Answer._fields[1:])  # fields of an answer in files


class AnswerMethods(LoadedModel):
    """The method of a `LoadedModel` that answers questions."""

    def answer(
        self, question: str | Sequence[str], context: str | Sequence[str], **options: Any
    ) -> Answer | list[Answer]:
        """Answer a question about a context, with a model trained on "question: … context: …", as T5 was.

            answer = model.answer("Who wrote it?", "Effi Briest was written by Theodor Fontane.")
            answer.text, answer.score, answer.start, answer.end
            model.answer(questions, contexts, no_answer="unanswerable", beams=4)

        A context that is longer than the input is read in overlapping windows.

        Args:
          question, context: strings, or lists of the same length; one context may be given for all questions.
          options: see `AnswerOptions`.

        Returns:
          An `Answer`, or a list of them for lists.
        """
        questions = [question] if isinstance(question, str) else question
        contexts = [context] * len(questions) if isinstance(context, str) else context
        if len(questions) != len(contexts):
            raise UserError(f"{len(questions)} question(s) but {len(contexts)} context(s): pass one of each.")
        check_arguments("answer", options, [field.name for field in dataclasses.fields(AnswerOptions)])
        settings = AnswerOptions(**options)
        pairs = list(zip(questions, contexts, strict=True))
        answers = answer(self, pairs, [windows_of(self, *pair, settings) for pair in pairs], settings)
        return answers[0] if isinstance(question, str) else answers


def windows_of(loaded: LoadedModel, question: str, context: str, settings: AnswerOptions) -> list[Span]:
    """Return the windows of a context. Each leaves room for the whole question."""
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise UserError(f"the {name} is empty.")
    alone = loaded.input_ids(prompt(question, ""))[1]
    room = settings.max_input_length - alone

    def tokens(text: str) -> int:
        return loaded.input_ids(prompt(question, text))[1] - alone

    if room <= settings.stride and tokens(context) > room:
        raise UserError(
            f"the question takes {alone} of {settings.max_input_length} input tokens. This leaves {max(room, 0)} for a "
            f"window of the context, too few for a stride of {settings.stride}. Raise max_input_length, lower stride, "
            f"or shorten the question ({question[:40]!r}…)."
        )
    return windows(context, tokens, room, settings.stride)


def answer(
    loaded: LoadedModel,
    questions: Sequence[tuple[str, str]],
    pieces: Sequence[Sequence[Span]],
    settings: AnswerOptions,
    *,
    rows: int | None = None,
    after_batch: Callable[[int], None] = lambda windows: None,
) -> list[Answer]:
    """Return an answer to each (question, context).

    Args:
      pieces: for each of them its `windows_of`.
      rows, after_batch: see `LoadedModel.predictions`; examples are windows.
    """
    vocabulary = loaded.model.output_vocabulary
    if settings.no_answer is not None:
        check_no_answer(settings.no_answer, vocabulary)

    def round_trip(text: str) -> str:
        return vocabulary.decode(vocabulary.encode(text))

    def answer_of(output: Generation, no_answer: float | None, context: str, window: Span) -> Answer:
        if is_no_answer(output.text, settings.no_answer):
            return Answer("", output.score, None, None, True, no_answer)
        span = locate(output.text, context, *window, round_trip)
        if span is None:
            return Answer(output.text, output.score, None, None, False, no_answer)
        text = context[slice(*span)] if has_unknown(output.text) else output.text
        return Answer(text, output.score, *span, False, no_answer)

    limit = settings.max_input_length
    inputs = [
        loaded.input_ids(prompt(question, context[span.start : span.end]), limit)[0]
        for (question, context), spans in zip(questions, pieces, strict=True)
        for span in spans
    ]
    common: dict[str, Any] = {"max_input_length": limit, "batch_size": settings.batch_size, "rows": rows}
    outputs = loaded.predictions(
        inputs, Decoding(beams=settings.beams), max_length=settings.max_length, after_batch=after_batch, **common
    )
    no_answers: list[float | None] = [None] * len(inputs)
    if settings.no_answer is not None:
        target = loaded.target_ids(settings.no_answer)[0]
        no_answers = [math.exp(score) for score in loaded.scores(inputs, [target] * len(inputs), **common)]
    answers, first = [], 0
    for (_, context), spans in zip(questions, pieces, strict=True):
        candidates = [
            answer_of(generations[0], probability, context, span)
            for generations, probability, span in zip(outputs[first:], no_answers[first:], spans, strict=False)
        ]
        first += len(spans)
        # On ties, the first window wins.
        best = max(candidates, key=lambda candidate: (not candidate.no_answer, candidate.score))
        if probabilities := [p for each in candidates if (p := each.no_answer_probability) is not None]:
            best = best._replace(no_answer_probability=min(probabilities))
        answers.append(best)
    return answers


# --- Files of questions -----------------------------------------------------------------------------------------------


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
            user_files.check_unicode(str(example["id"]), f'{self.where(number)}: "id"')
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
