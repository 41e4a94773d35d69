"""Tasks of questions and answers.

In a gin file:

    from t5x import answering

    MIXTURE_OR_TASK_NAME = @answering.squad_task()
    answering.squad_task:
      files = {'train': 'train-v2.0.json', 'validation': 'dev-v2.0.json'}
      no_answer = 'unanswerable'
      vocabulary = %VOCABULARY
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from t5x import metrics
from t5x.answering.squad import SquadDataSource, prompt
from t5x.data.file_tasks import text_task
from t5x.data.sources import JsonLinesDataSource
from t5x.data.tasks import Task
from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError

Example = dict[str, Any]


def squad_task(
    files: Mapping[str, str | Sequence[str]],
    vocabulary: Vocabulary,
    no_answer: str | None = None,
    titles: Mapping[str, str] | None = None,
    name: str = "squad",
) -> Task:
    """SQuAD from its official JSON; called again with the same arguments, it is the same task.

    The input is "question: … context: …", the target the first answer; the texts are as they are in the file. (T5's own
    mixtures had spaces around punctuation: `t5x.data.preprocessors.squad`.) Predictions are scored by exact match and
    F1, the best over the answers of a question.

    Args:
      files: {split: a path, a glob pattern, or several}; also compressed, also remote.
      vocabulary: of both inputs and targets.
      no_answer: SQuAD 2.0: the target of questions without an answer, such as "unanswerable". None refuses them.
      titles: {split: regular expression}: of these splits only articles whose title begins so. With one file for two
        splits, `{'train': '[A-M]', 'validation': '[^A-M]'}` parts its articles.
      name: by which it is registered, and under which its evaluations are written.
    """
    if no_answer is not None and not no_answer.strip():
        raise UserError("no_answer is empty: give a text, such as 'unanswerable'.")
    if no_answer is not None:
        check_no_answer(no_answer, vocabulary)
    told = {"files": dict(files), "vocabulary": vocabulary, "no_answer": no_answer, "titles": dict(titles or {})}
    return text_task(
        name,
        told,
        functools.partial(SquadDataSource, files, titles),
        [functools.partial(question_in_context, no_answer=no_answer)],
        [metrics.squad if no_answer is None else metrics.squad_v2],
        functools.partial(_answers_or_text, no_answer=no_answer),
    )


def closed_book_task(
    files: Mapping[str, str | Sequence[str]],
    vocabulary: Vocabulary,
    prefix: str = "nq question: ",
    name: str = "nq_open",
) -> Task:
    """Questions that are answered from memory, as NQ-open: JSON lines with "question" and "answer", a list of texts.

    The target is the first answer. Predictions are scored by exact match (and F1) with any of them, in the normal form
    of TriviaQA.

    Args:
      files: {split: a path, a glob pattern, or several}; also compressed, also remote.
      vocabulary: of both inputs and targets.
      prefix: put before every question, as it is.
      name: by which it is registered, and under which its evaluations are written.
    """
    told = {"files": dict(files), "vocabulary": vocabulary, "prefix": prefix}
    return text_task(
        name,
        told,
        functools.partial(JsonLinesDataSource, files),
        [functools.partial(question_alone, prefix=prefix)],
        [metrics.trivia_qa],
        _answers_or_text,
    )


def question_in_context(example: Example, no_answer: str | None = None) -> Example:
    """A question of `read_squad` as `inputs` and `targets`, with its `id` and `answers`."""
    if not example["answers"] and no_answer is None:
        raise UserError(
            "the question has no answer, as some of SQuAD 2.0. Say what to learn for such questions: "
            "no_answer='unanswerable' (--gin.answering.squad_task.no_answer=unanswerable)."
        )
    return {
        "inputs": prompt(example["question"], example["context"]),
        "targets": [*example["answers"], no_answer][0],
        "id": example["id"],
        "answers": example["answers"],
    }


def question_alone(example: Example, prefix: str) -> Example:
    """
    >>> question_alone({"question": "who wrote it", "answer": ["Fontane"]}, "nq question: ")
    {'inputs': 'nq question: who wrote it', 'targets': 'Fontane', 'answers': ['Fontane']}
    """
    question, answers = example.get("question"), example.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise UserError('it has no text "question".')
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise UserError('its "answer" must be a list of one text or more.')
    return {"inputs": prefix + question.strip(), "targets": answers[0], "answers": answers}


def is_no_answer(text: str, no_answer: str | None) -> bool:
    """Whether a model's text says that there is no answer; an empty one does always."""
    plain = " ".join(text.split()).casefold()
    return not plain or (no_answer is not None and plain == " ".join(no_answer.split()).casefold())


def check_no_answer(no_answer: str, vocabulary: Vocabulary) -> None:
    """Refuses a text that comes back from the vocabulary as another, by which no answer would be recognised."""
    made = vocabulary.decode(vocabulary.encode(no_answer))
    if not is_no_answer(made, no_answer):
        raise UserError(
            f"no_answer is {no_answer!r}, which a model cannot write: its vocabulary makes {made!r} of it. Give a text "
            "that it keeps, such as 'unanswerable'."
        )


def _answers_or_text(decoded: str, example: Example, is_target: bool, no_answer: str | None = None) -> Any:
    """All answers of a target; of a prediction its text, empty where it says that there is no answer."""
    if is_target:
        return list(example["answers"])
    return "" if is_no_answer(decoded, no_answer) else decoded
