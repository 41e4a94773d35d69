"""What a check reports."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
      status: `ok`; `warning`, if t5x runs but slower or otherwise than expected; `error`, if it does not.
      message: what was found.
      fix: what to do about it.
    """

    status: Literal["ok", "warning", "error"]
    message: str
    fix: str = ""


def ok(message: str) -> Finding:
    return Finding("ok", message)


def warning(message: str, fix: str) -> Finding:
    return Finding("warning", message, fix)


def error(message: str, fix: str) -> Finding:
    return Finding("error", message, fix)
