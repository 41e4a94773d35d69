"""Errors that the user can fix, and parts of their messages."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping


class UserError(Exception):
    """Something in the input, the configuration or the environment is wrong.

    The message says what is wrong, where, and how to fix it. The command line prints it without a traceback and
    exits with `exit_code`; from Python it is an ordinary exception.
    """

    exit_code = 2


class ArgumentError(UserError, ValueError):
    """An invalid argument of a function that Python code calls too, where T5X raises a ValueError."""


class TemporaryError(UserError):
    """A failure that may not happen again, such as a process that the system killed: a scheduler may retry."""

    exit_code = 75  # EX_TEMPFAIL


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where`, such as a file and line, before the message of a UserError that is raised in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def check_at_least(least: float, prefix: str = "", **values: float | None) -> None:
    """Raise a UserError if a number is below `least`. None is allowed.

    Args:
      prefix: of the names in the message, such as `--`.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UserError(f"{prefix}{name} is {value}: it must be at least {least}.")


def shorten(value: object, limit: int = 80) -> str:
    """Return the `repr` of a value for a message, cut with … if it is too long."""
    if isinstance(value, str):
        return repr(value if len(value) <= limit else f"{value[: limit - 1]}…")
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


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
    import difflib  # not needed to start a command

    shown = candidates if isinstance(candidates, Mapping) else {name: name for name in candidates}
    folded = {key.lower(): value for key, value in shown.items()}
    close = dict.fromkeys(folded[key] for key in difflib.get_close_matches(name.lower(), folded, cutoff=0.65))
    return f" Did you mean {' or '.join(f'`{value}`' for value in close)}?" if close else ""
