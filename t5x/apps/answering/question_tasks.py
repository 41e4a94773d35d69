"""Tasks of questions and answers.

In a gin file:

    from t5x.apps import answering

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
from t5x._runtime.errors import UserError
from t5x.apps.answering.squad import SquadDataSource, prompt
from t5x.data.file_tasks import text_task
from t5x.data.sources import JsonLinesDataSource
from t5x.data.tasks import Task
from t5x.data.vocabularies import Vocabulary

Example = dict[str, Any]


def squad_task(
    files: Mapping[str, str | Sequence[str]],
    vocabulary: Vocabulary,
    no_answer: str | None = None,
    titles: Mapping[str, str] | None = None,
    name: str = "squad",
) -> Task:
    """Return a SQuAD task from its official JSON. Calls with the same arguments return the same task.

    The input is "question: … context: …", the target the first answer; texts are unchanged. (T5's own mixtures had
    spaces around punctuation: `t5x.data.preprocessors.squad`.) Predictions are scored by exact match and F1, the best
    over the answers of a question.

    Args:
      files: {split: a path, a glob pattern, or several}; files may be compressed or remote.
      vocabulary: vocabulary of inputs and targets.
      no_answer: SQuAD 2.0: the target of questions without an answer, such as "unanswerable". None refuses them.
      titles: {split: regular expression}: use only articles whose title begins with a match. With one file for two
        splits, `{'train': '[A-M]', 'validation': '[^A-M]'}` divides its articles.
      name: name under which the task is registered and its evaluations are written.
    """
    if no_answer is not None and not no_answer.strip():
        raise UserError("no_answer is empty. Set it to a text, such as 'unanswerable'.")
    if no_answer is not None:
        check_no_answer(no_answer, vocabulary)
    settings = {"files": dict(files), "vocabulary": vocabulary, "no_answer": no_answer, "titles": dict(titles or {})}
    return text_task(
        name,
        settings,
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
    """Return a task of questions without context, like NQ-open: JSON lines with "question" and "answer", a list.

    The target is the first answer. Predictions are scored by exact match and F1 with any of them, normalised as in
    TriviaQA.

    Args:
      files: {split: a path, a glob pattern, or several}; files may be compressed or remote.
      vocabulary: vocabulary of inputs and targets.
      prefix: put before every question, unchanged.
      name: name under which the task is registered and its evaluations are written.
    """
    return text_task(
        name,
        {"files": dict(files), "vocabulary": vocabulary, "prefix": prefix},
        functools.partial(JsonLinesDataSource, files),
        [functools.partial(question_alone, prefix=prefix)],
        [metrics.trivia_qa],
        _answers_or_text,
    )


def question_in_context(example: Example, no_answer: str | None = None) -> Example:
    """Return a question of `read_squad` as `inputs` and `targets`, with its `id` and `answers`."""
    if not example["answers"] and no_answer is None:
        raise UserError(
            "the question has no answer, as some in SQuAD 2.0. Set the target of such questions: "
            "no_answer='unanswerable' (--gin.answering.squad_task.no_answer=unanswerable)."
        )
    return {
        "inputs": prompt(example["question"], example["context"]),
        "targets": [*example["answers"], no_answer][0],
        "id": example["id"],
        "answers": example["answers"],
    }


def question_alone(example: Example, prefix: str) -> Example:
    """Return a closed-book question as `inputs`, `targets` and `answers`.

    >>> question_alone({"question": "who wrote it", "answer": ["Fontane"]}, "nq question: ")
    {'inputs': 'nq question: who wrote it', 'targets': 'Fontane', 'answers': ['Fontane']}
    """
    question, answers = example.get("question"), example.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise UserError('"question" must be a non-empty string.')
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise UserError('"answer" must be a list of at least one non-empty string.')
    return {"inputs": prefix + question.strip(), "targets": answers[0], "answers": answers}


def is_no_answer(text: str, no_answer: str | None) -> bool:
    """Return whether a generated text means that there is no answer. An empty one always does."""
    plain = " ".join(text.split()).casefold()
    return not plain or (no_answer is not None and plain == " ".join(no_answer.split()).casefold())


def check_no_answer(no_answer: str, vocabulary: Vocabulary) -> None:
    """Raise a UserError if the vocabulary changes the text, so that it would not be recognised."""
    decoded = vocabulary.decode(vocabulary.encode(no_answer))
    if not is_no_answer(decoded, no_answer):
        raise UserError(
            f"no_answer is {no_answer!r}, which the model cannot generate: its vocabulary decodes it as {decoded!r}. "
            "Choose another text, such as 'unanswerable'."
        )


def _answers_or_text(decoded: str, example: Example, is_target: bool, no_answer: str | None = None) -> Any:
    """Return all answers of a target, or the text of a prediction, empty if it means no answer."""
    if is_target:
        return list(example["answers"])
    return "" if is_no_answer(decoded, no_answer) else decoded
