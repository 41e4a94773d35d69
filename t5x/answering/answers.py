"""Answers of a loaded model to questions about texts.

A context that does not fit into the input is read in windows that overlap, and the question is asked of each. Of the
windows that give an answer the one with the best score wins; only where none does, the question has no answer.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from t5x.answering.spans import Span, has_unknown, locate
from t5x.answering.squad import prompt
from t5x.answering.tasks import check_no_answer, is_no_answer
from t5x.answering.windows import windows
from t5x.errors import UserError
from t5x.inference.options import Decoding

if TYPE_CHECKING:
    from t5x.inference.loaded import LoadedModel


class Answer(NamedTuple):
    """To a question about a context.

    Attributes:
      text: as the model wrote it; what its vocabulary has no pieces for as the context has it, where that is clear.
        Empty where it says that there is no answer.
      score: the log probability of what it wrote; of beams, divided by the length penalty.
      start, end: context[start:end] is the answer; None where it does not stand there.
      no_answer: the model says that the context has no answer.
      no_answer_probability: that the model gives to the text that says so, given the context; of several windows the
        smallest. None where the model was not told that text.
    """

    text: str
    score: float
    start: int | None
    end: int | None
    no_answer: bool
    no_answer_probability: float | None


FIELDS = ("answer", *Answer._fields[1:])  # of an answer in files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering:
    """How answers are found.

    Attributes:
      no_answer: what the model was trained to write where there is no answer; None where it always gives one.
      beams: of beam search; 1 is greedy.
      max_length: tokens of an answer at most.
      max_input_length: tokens of question and context; longer contexts are read in windows.
      stride: tokens that two consecutive windows have in common.
      batch_size: windows computed together.
    """

    no_answer: str | None = None
    beams: int = 1
    max_length: int = 64
    max_input_length: int = 512
    stride: int = 128
    batch_size: int = 32

    def __post_init__(self):
        for name in ("beams", "max_length", "max_input_length", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if self.stride < 0:
            raise UserError(f"stride is {self.stride}: it must be at least 0.")
        if self.no_answer is not None and not self.no_answer.strip():
            raise UserError("no_answer is empty: give the text that the model was trained to write, or leave it out.")


def windows_of(loaded: "LoadedModel", question: str, context: str, how: Answering) -> list[Span]:
    """The pieces of the context that are asked one by one; the question stands before each of them whole."""
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise UserError(f"the {name} is empty.")
    alone = loaded.input_ids(prompt(question, ""))[1]
    room = how.max_input_length - alone
    tokens = lambda text: loaded.input_ids(prompt(question, text))[1] - alone
    if room <= how.stride and tokens(context) > room:
        raise UserError(
            f"the question takes {alone} of the input's {how.max_input_length} tokens, which leaves {max(room, 0)} for "
            f"a window of the context, of which {how.stride} overlap. Raise max_input_length, lower stride, or shorten "
            f"the question ({question[:40]!r}…)."
        )
    return windows(context, tokens, room, how.stride)


def answer(
    loaded: "LoadedModel",
    questions: Sequence[tuple[str, str]],
    pieces: Sequence[Sequence[Span]],
    how: Answering,
    *,
    rows: int | None = None,
    after_batch: Callable[[int], None] = lambda windows: None,
) -> list[Answer]:
    """An answer to each (question, context).

    Args:
      pieces: of each, its `windows_of`.
      rows, after_batch: see `LoadedModel.predictions`; it is told windows.
    """
    vocabulary = loaded.model.output_vocabulary
    if how.no_answer is not None:
        check_no_answer(how.no_answer, vocabulary)
    given_back = lambda text: vocabulary.decode(vocabulary.encode(text))
    limit = how.max_input_length
    inputs = [
        loaded.input_ids(prompt(question, context[span.start : span.end]), limit)[0]
        for (question, context), spans in zip(questions, pieces, strict=True)
        for span in spans
    ]
    common = {"max_input_length": limit, "batch_size": how.batch_size, "rows": rows}
    written = loaded.predictions(
        inputs, Decoding(beams=how.beams), max_length=how.max_length, after_batch=after_batch, **common
    )
    none = [None] * len(inputs)
    if how.no_answer is not None:
        target = loaded.target_ids(how.no_answer)[0]
        none = [math.exp(score) for score in loaded.scores(inputs, [target] * len(inputs), **common)]
    made, at = [], 0
    for (_, context), spans in zip(questions, pieces, strict=True):
        found = [
            _of_window(generations[0].text, generations[0].score, probability, context, span, how.no_answer, given_back)
            for generations, probability, span in zip(written[at:], none[at:], spans, strict=False)
        ]
        at += len(spans)
        # The first of equals.
        best = max(found, key=lambda one: (not one.no_answer, one.score))
        if how.no_answer is not None:
            best = best._replace(no_answer_probability=min(one.no_answer_probability for one in found))
        made.append(best)
    return made


def _of_window(
    text: str,
    score: float,
    none: float | None,
    context: str,
    window: Span,
    no_answer: str | None,
    given_back: Callable[[str], str],
) -> Answer:
    if is_no_answer(text, no_answer):
        return Answer("", score, None, None, True, none)
    span = locate(text, context, *window, given_back)
    if span is None:
        return Answer(text, score, None, None, False, none)
    return Answer(context[slice(*span)] if has_unknown(text) else text, score, *span, False, none)
