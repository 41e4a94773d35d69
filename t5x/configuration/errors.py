"""Configuration errors: what is wrong, where, and the nearest thing that would be right."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Sequence

from t5x.errors import UserError


class ConfigurationError(UserError):
    """The gin files or the `--gin.…` arguments are wrong or incomplete."""


class Problem(ConfigurationError):
    """Something wrong whose place is not known yet; whoever knows the place raises it anew with the place."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a binding was made: a line of a file, or an argument of the command line."""

    path: str | None
    line: int
    text: str

    @property
    def from_argument(self) -> bool:
        return self.path is None

    def __str__(self) -> str:
        return self.text if self.path is None else f"{display_path(self.path)}:{self.line}"

    def quoted(self) -> str:
        """The line itself, indented, to be put under a message; empty for an argument, which names itself."""
        return "" if self.path is None or not self.text.strip() else f"\n    {self.text.strip()}"


def display_path(path: str) -> str:
    """`path` relative to the working directory where it lies inside it."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith(os.pardir) else relative


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The `count` candidates most like `name`, best first; case and a missing prefix weigh little.

    >>> nearest("DatasetConfg", ["utils.DatasetConfig", "models.Model"])
    ['utils.DatasetConfig']
    """

    def likeness(candidate: str) -> float:
        def ratio(a: str, b: str) -> float:
            return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()

        return max(ratio(name, candidate), ratio(name.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]))

    scored = sorted((-likeness(candidate), candidate) for candidate in set(candidates))
    return [candidate for score, candidate in scored if -score >= 0.6][:count]


def suggestion(name: str, candidates: Iterable[str], prefix: str = " Nearest: ") -> str:
    """A sentence that names the nearest candidates, or nothing where none is near."""
    near = nearest(name, candidates)
    return f"{prefix}{', '.join(near)}." if near else ""


def join_problems(problems: Sequence[str], headline: str) -> ConfigurationError:
    """One error for all `problems`; the headline is left out where there is only one."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return ConfigurationError(unique[0])
    body = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in unique)
    return ConfigurationError(f"{headline} ({len(unique)} problems):\n{body}")
