"""Files of questions: JSON lines with `question`, `context` and optionally `id`, or SQuAD's official JSON."""

import json
from collections.abc import Iterator
from typing import Any

from t5x.answering.answers import FIELDS
from t5x.answering.squad import read_squad
from t5x.data.data_description import DataDescription
from t5x.errors import UserError
from t5x.files import text_lines
from t5x.inference.input_lines import Line, Lines


class QuestionLines(Lines):
    """The questions of JSON lines, with all their fields.

    Args:
      path: a file, or - for standard input.
      needs_id: whether every question must have an id.
    """

    def __init__(self, path: str, *, needs_id: bool):
        super().__init__(path, needs_targets=False, data=DataDescription(inputs="{question}{context}"))
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
            value = example.get(field)
            if not isinstance(value, str):
                raise UserError(f'{self.where(number)} must be an object with the strings "question" and "context".')
            if not value.strip():
                raise UserError(f'{self.where(number)} has an empty "{field}".')
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


class SquadQuestions:
    """The questions of SQuAD's JSON, with the interface of `Lines`."""

    is_stream = False

    def __init__(self, path: str):
        self.path = path
        self._questions = read_squad(path)

    def count(self) -> int:
        return len(self._questions)

    def __iter__(self) -> Iterator[Line]:
        for number, question in enumerate(self._questions, start=1):
            yield Line(number, json.dumps(question).encode(), dict(question))

    def where(self, number: int) -> str:
        return f"{self.path}, question {self._questions[number - 1]['id']!r}"


def open_questions(path: str, *, needs_id: bool) -> QuestionLines | SquadQuestions:
    """Open the file that `--input` names: .json is SQuAD's, everything else JSON lines."""
    if path.endswith(".json"):
        return SquadQuestions(path)
    return QuestionLines(path, needs_id=needs_id)
