"""Decode user files; errors carry the file and the position."""

import json
from typing import Any

from t5x.errors import UserError


def decoded(raw: bytes, where: str) -> str:
    """Decode a line, or an entire file, which must be UTF-8 without NUL bytes.

    Args:
      where: position for messages: `in.txt:3`.
    """
    if b"\0" in raw:
        raise UserError(
            f"{where} has a NUL byte at column {raw.index(0) + 1}: this is no text. Take it out, or in JSON write it "
            "as \\u0000."
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8. Convert the file: iconv "
            "-f latin1 -t utf-8."
        ) from error


def parsed(text: str, where: str) -> Any:
    """Parse JSON; raise a UserError naming `where` if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}.") from error


def check_unicode(text: str, where: str) -> None:
    """Raise a UserError if the text has a lone surrogate, which a JSON escape can produce and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} has half of a surrogate pair at character {error.start + 1}, which is no text. Mend the escape "
            "\\u…."
        ) from error
