"""Lines of JSON objects or tab-separated fields, in files that may be remote or compressed with gzip.

Files are read as streams: a collection of passages may be too large for a decompressed copy.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5x.errors import UserError
from t5x.files import text_lines
from t5x.files.text_lines import TextLine


def read_lines(path: str, name: str | None = None) -> Iterator[TextLine]:
    """Yield the non-blank lines of a file.

    Args:
      name: name of the file in messages; None is the path.
    """
    return (line for line in text_lines.read_lines(path, name) if line is not None and line.content.strip())


def fields_of(line: TextLine) -> dict[str, Any] | list[str]:
    """Return the JSON object of the line or, if it does not begin with {, its tab-separated fields."""
    text = line.text()
    return text_lines.parsed(text, line.where) if text.lstrip().startswith("{") else text.split("\t")


def find_id(record: Mapping[str, Any], names: Sequence[str], where: str) -> str | None:
    """Return the first of these fields that is present, as an id: a string or an integer."""
    for name in names:
        if (value := record.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f'{where}: "{name}" is {value!r}; an id must be a string or an integer.')
            text_lines.check_unicode(str(value), f'{where}: "{name}"')
            return str(value)
    return None


def find_text(record: Mapping[str, Any], names: Sequence[str], where: str, *, allow_blank: bool = True) -> str:
    """Return the first of these fields that is present, which must be a string."""
    for name in names:
        if (value := record.get(name)) is not None:
            if not isinstance(value, str):
                raise UserError(f'{where}: "{name}" is {str(value)[:60]!r}; it must be a string.')
            if not allow_blank and not value.strip():
                raise UserError(f'{where}: "{name}" is empty.')
            text_lines.check_unicode(value, f'{where}: "{name}"')
            return value
    raise UserError(f"{where} has no {' or '.join(names[:2])} (fields: {', '.join(list(record)[:8]) or 'none'}).")


@contextlib.contextmanager
def copying(name: str) -> Iterator[None]:
    """Report a full disk while a temporary copy of a file is written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"A copy of {name} cannot be written to {tempfile.gettempdir()}: {error.strerror or error}. Free disk "
            "space there, or set TMPDIR to another directory."
        ) from error
