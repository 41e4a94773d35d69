"""The options of `t5x answer`. Imports only what argparse needs, so that `--help` is fast."""

import dataclasses

from t5x._runtime.errors import UserError, check_at_least
from t5x.cli.options import OutputOptions
from t5x.cli.parser import flag, option


@dataclasses.dataclass(kw_only=True)
class SingleQuestion:
    """One question, whose answer is printed."""

    question: str | None = option("TEXT", "the question")
    context: str | None = option("TEXT", "the text that contains the answer")
    json: bool = flag("also print the answer's score and position")


@dataclasses.dataclass(kw_only=True)
class QuestionFile(OutputOptions):
    """A file of questions, and the files for their answers."""

    input: str | None = option(
        "FILE",
        'JSON lines with "question", "context" and optionally "id" (- is standard input), or SQuAD\'s official .json, '
        "whose answers are then scored",
    )
    squad_predictions: str | None = option("FILE", "also write {id: answer}, as SQuAD's scripts read it")
    squad_na_probs: str | None = option("FILE", "also write {id: probability that there is no answer}")
    checkpoint_period: int = option("N", "save results every N batches (16)", 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options for answers."""

    no_answer: str | None = option("TEXT", "what the model was trained to generate without an answer")
    beams: int = option("N", "beam search (1, greedy)", 1)
    max_length: int = option("N", "maximum tokens of an answer (64)", 64)
    max_input_length: int = option(
        "N",
        "tokens of question and context (512); longer contexts are read in windows, and the best answer is used",
        512,
    )
    stride: int = option("N", "tokens that two consecutive windows share (128)", 128)
    batch_size: int = option("N", "windows per batch (32)", 32)

    def __post_init__(self):
        counts = ("beams", "max_length", "max_input_length", "batch_size")
        check_at_least(1, **{name: getattr(self, name) for name in counts})
        check_at_least(0, stride=self.stride)
        if self.no_answer is not None and not self.no_answer.strip():
            raise UserError("no_answer is empty. Pass the text that the model was trained to generate, or omit it.")
