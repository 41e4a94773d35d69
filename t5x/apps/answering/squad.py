"""The official JSON of SQuAD 1.1 and 2.0."""

import codecs
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5x._runtime.errors import UserError, located
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.files import user_files
from t5x.files.local_copies import LocalCopy

logger = logging.getLogger(__name__)

Question = dict[str, Any]

_SHOWN = 8  # maximum titles in a message


def prompt(question: str, context: str) -> str:
    """Return the input for a question about a context.

    >>> prompt(" Who wrote it? ", "Fontane did.")
    'question: Who wrote it? context: Fontane did.'
    """
    return f"question: {question.strip()} context: {context}"


def read_squad(path: str | os.PathLike[str], titles: str | None = None, name: str | None = None) -> list[Question]:
    """Return the questions of a file in order: {"id", "title", "question", "context", "answers": [text, …]}.

    Args:
      path: path of an uncompressed file.
      titles: a regular expression; only articles whose title begins with a match are used.
      name: name of the file in messages; the path if None.
    """
    name = os.fspath(path) if name is None else name
    raw = user_files.read_bytes(path).removeprefix(codecs.BOM_UTF8)
    content = user_files.parsed(user_files.decoded(raw, name), name)
    by_id: dict[str, tuple[str, Question]] = {}
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

        def read(index: int) -> Question:
            return questions[index] | {"answers": list(questions[index]["answers"])}

        def locate(index: int) -> str:
            return f"{copy.name}, question {questions[index]['id']!r}"

        return FileExamples(copy.name, len(questions), read, locate)


def _questions(content: Any) -> Iterator[tuple[str, Question]]:
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


def _select_titles(questions: list[Question], titles: str) -> list[Question]:
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
