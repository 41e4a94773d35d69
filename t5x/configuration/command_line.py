"""`--gin.NAME=VALUE` arguments."""

import dataclasses
import logging
import tokenize
from collections.abc import Sequence

from gin import config_parser

from t5x.configuration.state import ConfigurationError, Origin
from t5x.configuration.values import ParserDelegate

_logger = logging.getLogger(__name__)

_STARTS_GIN = ("@", "%", "{", "[", "(", "'", '"')
_PYTHON_CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}


def split_gin_args(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the gin bindings off a command line.

    Args:
      argv: arguments. `--gin.NAME=VALUE`, `--gin_bindings=STATEMENT` and `--gin_bindings STATEMENT` are bindings;
        everything after a lone `--` is left alone.

    Returns:
      The other arguments, and the bindings as `NAME = VALUE` in the order given.

    >>> split_gin_args(["--gin_file=a.gin", "--gin.BATCH_SIZE=64"])
    (['--gin_file=a.gin'], ['BATCH_SIZE = 64'])
    """
    others: list[str] = []
    bindings: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--":
            return [*others, argument, *arguments], bindings
        if argument.startswith("--gin."):
            bindings.append(_binding(argument))
        elif argument.startswith("--gin_bindings="):
            bindings.append(argument.removeprefix("--gin_bindings="))
        elif argument == "--gin_bindings":
            try:
                bindings.append(next(arguments))
            except StopIteration:
                raise ConfigurationError("--gin_bindings has no value. Write --gin_bindings='NAME = VALUE'.") from None
        else:
            others.append(argument)
    return others, bindings


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
    """Rewrite each `--gin.NAME=VALUE` as `--gin_bindings=NAME = VALUE`, as T5X does.

    >>> rewrite_gin_args(["prog", "--gin.BATCH_SIZE=64"])
    ['prog', '--gin_bindings=BATCH_SIZE = 64']
    """
    return [f"--gin_bindings={_binding(a)}" if a.startswith("--gin.") else a for a in args]


def _binding(argument: str) -> str:
    name, equals, value = argument.removeprefix("--gin.").partition("=")
    if not equals:
        raise ConfigurationError(f"{argument} has no value. Write {argument}=VALUE.")
    return f"{name} = {value}"


def read_argument(binding: str) -> tuple[str, Origin]:
    """Return a binding as gin text, and its origin; a value that is not gin becomes a string.

    >>> read_argument("MODEL_DIR = /tmp/run")[0]
    "MODEL_DIR = '/tmp/run'"
    """
    name, equals, value = (part.strip() for part in binding.partition("="))
    origin = Origin(path=None, line=1, text=f"--gin.{name}={value}" if equals else f"--gin_bindings={binding}")
    error = _syntax_error(binding)
    if error is None:
        return binding, origin
    if not equals or _syntax_error(f"{name} = 0"):
        raise ConfigurationError(f"{origin}: not a gin binding ({error}). Write --gin.NAME=VALUE.")
    if value.startswith(_STARTS_GIN):
        raise ConfigurationError(f"{origin}: invalid value ({error}). Check the quotes and brackets.")
    if value.lower() in _PYTHON_CONSTANTS:
        constant = _PYTHON_CONSTANTS[value.lower()]
        raise ConfigurationError(
            f"{origin}: write --gin.{name}={constant}, or --gin.{name}='\"{value}\"' for a string."
        )
    _logger.info("%s: using the string %r", origin, value)
    return f"{name} = {value!r}", dataclasses.replace(origin, unquoted=True)


def _syntax_error(text: str) -> str | None:
    try:
        list(config_parser.ConfigParser(text + "\n", ParserDelegate()))
    except (SyntaxError, tokenize.TokenError) as error:
        return str(error.args[0]).splitlines()[0].rstrip(".")
    return None
