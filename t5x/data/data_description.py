"""How the rows of a file become inputs and targets: the fields, a prefix, the lengths. Checkpoints store it."""

import dataclasses
import functools
import json
import string
from collections.abc import Mapping
from typing import Any

from t5x._runtime.errors import UserError

MAX_INPUT_LENGTH, MAX_TARGET_LENGTH = 512, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDescription:
    """The options with which `t5x train --data` reads a file. `infer`, `eval` and `data` use them again.

    Attributes:
      inputs, targets: the name of a field, or a template with fields in braces: `premise: {s1} hypothesis: {s2}`.
      prefix: text put before every input, unchanged.
      columns: names of the columns of .tsv and .csv files without a header; None reads them from the first line.
      max_input_length, max_target_length: tokens, with EOS.
    """

    inputs: str = "inputs"
    targets: str = "targets"
    prefix: str = ""
    columns: tuple[str, ...] | None = None
    max_input_length: int = MAX_INPUT_LENGTH
    max_target_length: int = MAX_TARGET_LENGTH

    def __post_init__(self):
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))

    @classmethod
    def of_checkpoint(cls, stored: Mapping[str, Any] | None, path: str, **options: Any) -> "DataDescription":
        """Return the description of the data of a model.

        Args:
          stored: what its checkpoint stores; None if nothing.
          path: the checkpoint, for messages.
          given: options that override it; None does not.

        Raises:
          UserError: the stored description is invalid.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        stored = stored or {}
        known = {name: stored[name] for name in names if name in stored}
        for name, value in known.items():
            if not _is_valid(name, value):
                raise UserError(f"{path}: {name} of its data is {str(value)[:80]!r}. Pass --{name}.")
        return cls(**known | {name: value for name, value in options.items() if value is not None})

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return dataclasses.asdict(self) | {"columns": None if self.columns is None else list(self.columns)}

    def template(self) -> str:
        """Return the inputs with their prefix, as a template."""
        return self.prefix + (self.inputs if "{" in self.inputs else f"{{{self.inputs}}}")

    def fields(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, without the lengths, as JSON values."""
        default, names = DataDescription().to_json(), ("inputs", "targets", "prefix", "columns")
        return {name: value for name, value in self.to_json().items() if name in names and value != default[name]}


def _is_valid(name: str, value: Any) -> bool:
    if name == "columns":
        return value is None or (isinstance(value, list) and all(isinstance(column, str) for column in value))
    return type(value) is int and value > 0 if name.startswith("max_") else isinstance(value, str)


def fill(template: str, example: Mapping[str, Any]) -> str:
    """Return the text of a field, or of a template with fields in braces. Numbers are converted to text.

    >>> fill("label", {"label": 1})
    '1'
    >>> fill("premise: {s1} hypothesis: {s2}", {"s1": "It rains.", "s2": "It is wet."})
    'premise: It rains. hypothesis: It is wet.'

    Raises:
      UserError: a field is neither text nor a number.
    """
    return "".join(literal + ("" if name is None else _text(example, name)) for literal, name in _parts(template))


def field_names(template: str) -> list[str]:
    """Return the fields that a template, or the name of a field, reads."""
    return [name for _, name in _parts(template) if name is not None]


@functools.cache
def _parts(template: str) -> list[tuple[str, str | None]]:
    """Return [(text, the field after it)] of a template; the last field may be None."""
    if "{" not in template and "}" not in template:
        return [("", template)]
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"The template {template!r} cannot be read: {error}. Write {{{{ for a brace.") from error
    names = [name for _, name, _, _ in fields if name is not None]
    if not all(names) or not names or any(form or conversion for _, _, form, conversion in fields):
        raise UserError(f"The template {template!r} must have names of fields in braces: 'question: {{question}}'.")
    return [(literal, name) for literal, name, _, _ in fields]


def _text(example: Mapping[str, Any], field: str) -> str:
    value = example[field]
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    what = "empty (null)" if value is None else f"{str(value)[:60]!r}"
    raise UserError(f"the field {field!r} is {what}, where text or a number is needed.")
