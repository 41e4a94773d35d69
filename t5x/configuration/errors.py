"""Configuration errors, with the place of the mistake and the closest valid name."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence

from t5x.errors import UserError


class ConfigurationError(UserError):
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


def did_you_mean(name: str, candidates: Iterable[str] | Mapping[str, str]) -> str:
    """Return a sentence that suggests the closest candidates, or an empty string if none is close.

    Args:
      candidates: valid names; a mapping suggests its values where a key is close.

    >>> did_you_mean("batchsize", ["batch_size", "seed"])
    ' Did you mean `batch_size`?'
    """
    shown = candidates if isinstance(candidates, Mapping) else {name: name for name in candidates}
    folded = {key.lower(): value for key, value in shown.items()}
    close = dict.fromkeys(folded[key] for key in difflib.get_close_matches(name.lower(), folded, cutoff=0.65))
    return f" Did you mean {' or '.join(f'`{value}`' for value in close)}?" if close else ""


def combine(problems: Sequence[str], headline: str) -> ConfigurationError:
    """Return one error that lists all `problems`; a single problem gets no headline."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return ConfigurationError(unique[0])
    body = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in unique)
    return ConfigurationError(f"{headline} ({len(unique)} problems):\n{body}")
