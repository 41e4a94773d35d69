"""`--gin.NAME=VALUE` arguments: from the command line to gin statements."""

from __future__ import annotations

import logging
import re
import tokenize
from collections.abc import Sequence

from gin import config_parser

from t5x.configuration.errors import ConfigurationError, Origin

_logger = logging.getLogger(__name__)

_BINDING = re.compile(r"\s*(?P<name>[^=\s]+?)\s*=(?P<value>.*)", re.DOTALL)
_NAME = re.compile(r"([A-Za-z_]\w*/)*([A-Za-z_]\w*\.)*[A-Za-z_]\w*")
_STARTS_GIN = ("@", "%", "{", "[", "(", "'", '"')
_MEANT_PYTHON = {"true": "True", "false": "False", "none": "None", "null": "None"}


class _Names(config_parser.ParserDelegate):
    """Reads references and macros without looking for what they name."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
        return f"@{scoped_configurable_name}" + ("()" if evaluate else "")

    def macro(self, macro_name: str) -> str:
        return f"%{macro_name}"


def _gin_error(text: str) -> str | None:
    """Why `text` is not a sequence of gin statements, or None where it is."""
    try:
        for _ in config_parser.ConfigParser(text + "\n", _Names()):
            pass
    except SyntaxError as error:
        return error.msg
    except tokenize.TokenError as error:
        return str(error.args[0])
    return None


def split_gin_args(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes the gin bindings out of a command line.

    Args:
      argv: arguments. `--gin.NAME=VALUE`, `--gin_bindings=STATEMENT` and `--gin_bindings STATEMENT` are taken, up to
        a lone `--`.

    Returns:
      The other arguments, and the bindings as `NAME = VALUE` in the order given.

    >>> split_gin_args(["--gin_file=a.gin", "--gin.BATCH_SIZE=64"])
    (['--gin_file=a.gin'], ['BATCH_SIZE = 64'])
    """
    rest: list[str] = []
    bindings: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--":
            return [*rest, argument, *arguments], bindings
        if argument.startswith("--gin."):
            bindings.append(_binding(argument))
        elif argument.startswith("--gin_bindings="):
            bindings.append(argument.removeprefix("--gin_bindings="))
        elif argument == "--gin_bindings":
            try:
                bindings.append(next(arguments))
            except StopIteration:
                raise ConfigurationError("--gin_bindings needs a value: --gin_bindings='NAME = VALUE'.") from None
        else:
            rest.append(argument)
    return rest, bindings


def rewrite_gin_args(argv: Sequence[str]) -> list[str]:
    """T5X's form of the same: each `--gin.NAME=VALUE` becomes `--gin_bindings=NAME = VALUE`, the rest stays.

    >>> rewrite_gin_args(["prog", "--gin.BATCH_SIZE=64"])
    ['prog', '--gin_bindings=BATCH_SIZE = 64']
    """
    return [f"--gin_bindings={_binding(a)}" if a.startswith("--gin.") else a for a in argv]


def _binding(argument: str) -> str:
    name, equals, value = argument.removeprefix("--gin.").partition("=")
    if not equals:
        raise ConfigurationError(f"{argument}: a value is missing. Write {argument}=VALUE.")
    return f"{name} = {value}"


def as_statements(binding: str) -> tuple[str, Origin]:
    """Reads one binding as gin text; a value that is not gin is taken as a string, and the log says so.

    Args:
      binding: `NAME = VALUE`, or any other gin statements (an include, an import).

    Returns:
      The gin text, and the argument as the user gave it.

    >>> as_statements("MODEL_DIR = /tmp/run")[0]
    "MODEL_DIR = '/tmp/run'"
    """
    match = _BINDING.fullmatch(binding)
    shown = f"--gin.{match['name']}={match['value'].strip()}" if match else f"--gin_bindings={binding}"
    origin = Origin(path=None, line=1, text=shown)
    error = _gin_error(binding)
    if error is None:
        return binding, origin
    if match is None:
        raise ConfigurationError(f"{shown}: not a gin statement ({error}). Write --gin.NAME=VALUE.")
    name, value = match["name"], match["value"].strip()
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{shown}: {name!r} is not a name. Write MACRO, module.function.parameter or the latter after a scope/."
        )
    if value.startswith(_STARTS_GIN):
        reason = error.splitlines()[0].rstrip(".")
        raise ConfigurationError(f"{shown}: the value is not valid gin ({reason}). Is a quote or a bracket missing?")
    if value.lower() in _MEANT_PYTHON:
        meant = _MEANT_PYTHON[value.lower()]
        raise ConfigurationError(f"{shown}: write --gin.{name}={meant}, or --gin.{name}='\"{value}\"' for the string.")
    _logger.info("%s: read as the string %r", shown, value)
    return f"{name} = {value!r}", origin
