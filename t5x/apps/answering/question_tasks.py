"""Tasks of questions and answers, and the official JSON of SQuAD 1.1 and 2.0.

In a gin file:

    from t5x.apps import answering

    MIXTURE_OR_TASK_NAME = @answering.squad_task()
    answering.squad_task:
      files = {'train': 'train-v2.0.json', 'validation': 'dev-v2.0.json'}
      no_answer = 'unanswerable'
      vocabulary = %VOCABULARY
"""

import codecs
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5x import metrics
from t5x._runtime.errors import UserError, located
from t5x.data.file_tasks import text_task
from t5x.data.sources import JsonLinesDataSource
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.data.tasks import Task
from t5x.data.vocabularies import Vocabulary
from t5x.files import user_files
from t5x.files.local_copies import LocalCopy

logger = logging.getLogger(__name__)

Example = dict[str, Any]

_SHOWN = 8  # maximum titles in a message


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


def prompt(question: str, context: str) -> str:
    """Return the input for a question about a context.

    >>> prompt(" Who wrote it? ", "Fontane did.")
    'question: Who wrote it? context: Fontane did.'
    """
    return f"question: {question.strip()} context: {context}"


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


# --- SQuAD's files ----------------------------------------------------------------------------------------------------


def read_squad(path: str | os.PathLike[str], titles: str | None = None, name: str | None = None) -> list[Example]:
    """Return the questions of a file in order: {"id", "title", "question", "context", "answers": [text, …]}.

    Args:
      path: path of an uncompressed file.
      titles: a regular expression; only articles whose title begins with a match are used.
      name: name of the file in messages; the path if None.
    """
    name = os.fspath(path) if name is None else name
    raw = user_files.read_bytes(path).removeprefix(codecs.BOM_UTF8)
    content = user_files.parsed(user_files.decoded(raw, name), name)
    by_id: dict[str, tuple[str, Example]] = {}
    with located(name):
        for where, question in _questions(content):
            first, _ = by_id.setdefault(question["id"], (where, question))
            if first != where:
                raise UserError(f"{first} and {where} have the same id, {question['id']!r}. Make ids unique.")
        questions = [question for _, question in by_id.values()]
        return questions if titles is None else _select_titles(questions, titles)


class SquadDataSource(FilesDataSource):
    """The questions of SQuAD's files; see `read_squad`.

    Args:
      split_to_filepattern: {split: a path, a glob pattern, or several}; compressed (.gz, .bz2, .xz) and remote files
        are copied first.
      titles: {split: regular expression}: use only articles whose title begins with a match. Splits without files are
        ignored.
    """

    def __init__(self, split_to_filepattern: Mapping[str, Patterns], titles: Mapping[str, str] | None = None):
        super().__init__(split_to_filepattern)
        self._titles = {split: pattern for split, pattern in (titles or {}).items() if split in self.splits}
        if absent := {*(titles or {})} - {*self.splits}:
            logger.info("titles of %s are not used: there are no files of it", ", ".join(sorted(absent)))

    def _settings(self, split: str) -> dict[str, Any]:
        return super()._settings(split) | {"_titles": self._titles.get(split)}

    def _open_files(self, split: str, copies: Sequence[LocalCopy]) -> list[FileExamples]:
        return [self._open_titles(copy, self._titles.get(split)) for copy in copies]

    def _open_titles(self, copy: LocalCopy, titles: str | None) -> FileExamples:
        questions = read_squad(copy.path, titles, copy.name)

        def read(index: int) -> Example:
            return questions[index] | {"answers": list(questions[index]["answers"])}

        def locate(index: int) -> str:
            return f"{copy.name}, question {questions[index]['id']!r}"

        return FileExamples(copy.name, len(questions), read, locate)


def _questions(content: Any) -> Iterator[tuple[str, Example]]:
    """Yield each question with its path in the file."""
    for article, of_article in _entries(content, "data", "the file"):
        title = article.get("title", "")
        for paragraph, of_paragraph in _entries(article, "paragraphs", of_article):
            context = text_field(paragraph, "context", of_paragraph)
            for question, where in _entries(paragraph, "qas", of_paragraph):
                yield (
                    where,
                    {
                        "id": text_field(question, "id", where),
                        "title": title if isinstance(title, str) else "",
                        "question": text_field(question, "question", where),
                        "context": context,
                        "answers": _answers(question, context, where),
                    },
                )


def _entries(parent: Any, field: str, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of a list, each with its path in the file."""
    entries = parent.get(field) if isinstance(parent, dict) else None
    if not isinstance(entries, list):
        raise UserError(
            f"{where} has no list {field!r}. SQuAD's JSON is "
            '{"data": [{"title", "paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}.'
        )
    inside = "" if where == "the file" else f"{where}."
    for index, entry in enumerate(entries):
        path = f"{inside}{field}[{index}]"
        if not isinstance(entry, dict):
            raise UserError(f"{path} is not an object.")
        yield entry, path


def text_field(parent: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field, which must be a string that is not blank."""
    text = parent.get(field)
    if not isinstance(text, str):
        raise UserError(f"{where} has no string {field!r}.")
    if not text.strip():
        raise UserError(f"{where} has an empty {field!r}.")
    user_files.check_unicode(text, f"{where}, {field!r},")
    return text


def _answers(question: Mapping[str, Any], context: str, where: str) -> list[str]:
    """Return the texts of the answers; empty if the question is impossible, as in SQuAD 2.0."""
    if question.get("is_impossible") or "answers" not in question:  # a test set
        return []
    texts = []
    for answer, of_answer in _entries(question, "answers", where):
        text = text_field(answer, "text", of_answer)
        start = answer.get("answer_start")
        if start is not None and (type(start) is not int or start < 0 or not context.startswith(text, start)):
            raise UserError(
                f"{of_answer} is {text!r} at answer_start {start!r}, but there the context has "
                f"{context[start : start + len(text)] if type(start) is int and start >= 0 else None!r}. Offsets "
                "count characters, not bytes."
            )
        texts.append(text)
    return texts


def _select_titles(questions: list[Example], titles: str) -> list[Example]:
    try:
        pattern = re.compile(titles)
    except re.error as error:
        raise UserError(f"titles {titles!r} is not a regular expression: {error}.") from error
    selected = [question for question in questions if pattern.match(question["title"])]
    if not selected:
        all_titles = list(dict.fromkeys(question["title"] for question in questions))
        more = f" and {len(all_titles) - _SHOWN} more" if len(all_titles) > _SHOWN else ""
        first = ", ".join(all_titles[:_SHOWN])
        raise UserError(f"no title begins with {titles!r}. The titles are {first}{more}.")
    return selected
