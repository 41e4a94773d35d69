"""Answer questions about contexts with a loaded model.

A context that does not fit into the input is read in overlapping windows, and the question is asked for each. The
window with the best score among those with an answer wins; the question has no answer only if no window has one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from t5x._runtime.errors import UserError
from t5x.apps.answering.answer_options import AnswerOptions
from t5x.apps.answering.question_tasks import check_no_answer, is_no_answer
from t5x.apps.answering.spans import Span, has_unknown, locate, windows
from t5x.apps.answering.squad import prompt
from t5x.inference.loaded import Generation, LoadedModel
from t5x.inference.options import Decoding, check_arguments


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
