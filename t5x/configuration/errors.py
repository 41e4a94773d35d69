"""The type and format of configuration errors. The messages are in `reading`, `names` and `checking`."""

import dataclasses
import os
from collections.abc import Sequence

from t5x.errors import ArgumentError


class ConfigurationError(ArgumentError):
    """The gin files or the `--gin.…` arguments are wrong or incomplete."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The line of a gin file, or the command-line argument, that a statement comes from.

    Attributes:
      path: the gin file; None for an argument.
      line: line number in the file.
      text: the line, or the argument as the user typed it.
      unquoted: whether the argument is a string without quotes, which gin itself does not accept.
    """

    path: str | None
    line: int
    text: str
    unquoted: bool = False

    def __str__(self) -> str:
        return self.text if self.path is None else f"{display_path(self.path)}:{self.line}"

    def describe(self, problem: object) -> str:
        """Return the problem with its place, followed by the line itself."""
        line = "" if self.path is None or not self.text.strip() else f"\n    {self.text.strip()}"
        return f"{self}: {problem}{line}"


def display_path(path: str) -> str:
    """Return `path` relative to the working directory if it is inside it, else the absolute path."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith(os.pardir) else relative


def combine(problems: Sequence[str], headline: str) -> ConfigurationError:
    """Return one error that lists all `problems`; a single problem gets no headline."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return ConfigurationError(unique[0])
    body = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in unique)
    return ConfigurationError(f"{headline} ({len(unique)} problems):\n{body}")
