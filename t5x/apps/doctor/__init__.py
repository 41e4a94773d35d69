"""`t5x doctor`: checks whether a machine is ready, with a fix for everything that is not.

A topic is a module with `check(args)`, which yields findings.
"""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
      status: `ok`; `warning` if t5x runs, but slowly or not as expected; `error` if it cannot run.
      message: the observation.
      fix: how to fix the problem.
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
