"""Read gin files and command-line bindings, statement by statement, so that errors can name the line."""

import dataclasses
import logging
import os
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gin import config, config_parser

from t5x._runtime.errors import did_you_mean, display_path
from t5x.configuration import state as states
from t5x.configuration.names import FileNames, configurable
from t5x.configuration.state import ConfigurationError, Origin, combine_errors
from t5x.configuration.values import MACRO, ParsedReference, ParserDelegate, map_value, parameters_of

STAND_INS = {"seqio": "t5x.data.gin_seqio", "optax": "t5x.optimizers.gin_optax"}

_logger = logging.getLogger(__name__)

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_STARTS_GIN = ("@", "%", "{", "[", "(", "'", '"')
_PYTHON_CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}


def parse(
    *,
    gin_files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (".",),
    entry_points: Mapping[str, Callable[..., Any]],
    stand_ins: Mapping[str, str] = STAND_INS,
) -> None:
    """Add gin files, then bindings, to the configuration; later values win.

    Args:
      gin_files: paths, relative to the working directory, a search path, or the directory of the `t5x` package.
      bindings: `NAME = VALUE` each, as `split_gin_args` returns them; a value that is not gin is a string.
      search_paths: directories of gin files; includes are also found next to the file that includes them.
      entry_points: functions that `import __main__ as …` offers, for example `{"train": t5x.train.train}`.
      stand_ins: packages that mean another module when a gin file imports them, and that module.

    Raises:
      ConfigurationError: lists every unknown name and parameter. The configuration is then unchanged.
    """
    state = states.current().copy()
    state.entry_points.update(entry_points)
    state.stand_ins.update(stand_ins)
    reader = _Reader(state, search_paths)
    stopped = None
    try:
        for name in [gin_files] if isinstance(gin_files, str) else gin_files:
            reader.read_file(name)
        for binding in bindings:
            reader.read_binding(binding)
    except ConfigurationError as error:  # nothing after this can be read
        reader.report(error)
        stopped = error
    if reader.problems:
        raise combine_errors(list(reader.problems.values()), "The configuration is invalid") from stopped
    states.commit(state, reader.values)


class _Reader:
    """Collects the values and problems of one call of `parse`."""

    def __init__(self, state: states.State, search_paths: Sequence[str]):
        self.values: dict[states.Key, Any] = {}
        self.problems: dict[tuple[str | None, str], str] = {}  # by file and problem, without the line
        self._state = state
        self._search_paths = search_paths
        self._open_files: list[str] = []

    def read_file(self, name: str, included_at: Origin | None = None) -> None:
        try:
            path = _find_file(name, self._search_paths, included_at)
            if path in self._open_files:
                chain = " -> ".join(map(display_path, [*self._open_files, path]))
                raise ConfigurationError(f"gin files include each other: {chain}.")
            text = Path(path).read_text(encoding="utf-8-sig")
        except (ConfigurationError, OSError, UnicodeDecodeError) as error:
            problem = error if isinstance(error, ConfigurationError) else f"cannot read gin file {name!r}: {error}."
            raise ConfigurationError(included_at.describe(problem) if included_at else str(problem)) from error
        lines = text.splitlines()
        self._open_files.append(path)
        self._read(text, lambda line: Origin(path, line, lines[line - 1] if 0 < line <= len(lines) else ""))
        self._open_files.pop()

    def read_binding(self, binding: str) -> None:
        try:
            text, origin = _read_argument(binding)
        except ConfigurationError as error:
            self.report(error)
        else:
            self._read(text, lambda line: origin)

    def report(self, error: ConfigurationError, origin: Origin | None = None) -> None:
        key = (origin.path if origin else None, str(error))
        self.problems.setdefault(key, origin.describe(error) if origin else str(error))

    def _read(self, text: str, origin_of: Callable[[int], Origin]) -> None:
        names = FileNames(self._state)
        for statement in _statements(text, origin_of):
            origin = origin_of(statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                self.read_file(statement.filename, included_at=origin)
            elif isinstance(statement, config_parser.ImportStatement):
                try:
                    names.add_import(statement)
                except ConfigurationError as error:
                    raise ConfigurationError(origin.describe(error)) from error
            else:
                try:
                    self._bind(statement, names, origin)
                except ConfigurationError as error:
                    self.report(error, origin)

    def _bind(self, statement: Any, names: FileNames, origin: Origin) -> None:
        if isinstance(statement, config_parser.BlockDeclaration):
            names.find(statement.selector)
            return
        if statement.arg_name:
            key = (statement.scope, names.find(statement.selector), statement.arg_name)
            _check_parameter(statement.selector, key)
        else:
            key = ("/".join(filter(None, (statement.scope, statement.selector))), MACRO, "value")

        def resolve(leaf: Any) -> Any:
            if not isinstance(leaf, ParsedReference):
                return leaf
            *scopes, selector = leaf.name.split("/")
            return ParsedReference("/".join([*scopes, names.find(selector)]), leaf.evaluate)

        self.values[key] = map_value(statement.value, resolve)
        self._state.origins[key] = origin


def _check_parameter(written: str, key: states.Key) -> None:
    try:
        config.ParsedBindingKey.parse(key)
    except ValueError as error:
        known = list(parameters_of(configurable(key[1])))
        close = did_you_mean(key[2], known)
        raise ConfigurationError(
            f"`{written}` has no parameter `{key[2]}`.{close} Parameters: {', '.join(known) or 'none'}."
        ) from error


def _statements(text: str, origin_of: Callable[[int], Origin]) -> Iterator[Any]:
    try:
        yield from config_parser.ConfigParser(text, ParserDelegate())
    except SyntaxError as error:
        problem = f"syntax error: {error.msg}"
        if match := re.search(r"Failed to parse token '(.+)'", error.msg):
            word = match[1]
            problem = f"`{word}` is not a value. Write '{word}' for a string, %{word} for a macro."
        raise ConfigurationError(origin_of(error.lineno or 1).describe(problem)) from error
    except tokenize.TokenError as error:
        origin = origin_of(error.args[1][0])
        raise ConfigurationError(origin.describe("a bracket or quote before this line is not closed.")) from error
    except ValueError as error:  # an ambiguous constant
        raise ConfigurationError(f"{origin_of(1)}: {error}") from error


def _find_file(name: str, search_paths: Sequence[str], included_at: Origin | None) -> str:
    """Return the path of a gin file; see `parse` for where it is looked for."""
    name = os.path.expanduser(name)
    beside = [os.path.dirname(included_at.path)] if included_at and included_at.path else []
    directories = [os.curdir, *map(os.path.expanduser, search_paths), *beside, _PACKAGE_PARENT]
    paths = [os.path.abspath(os.path.join(directory, name)) for directory in directories]
    for path in paths:
        if os.path.isfile(path):
            return path
    siblings = [file for path in paths for file in Path(path).parent.glob("*.gin")]
    close = ""
    for files in (siblings, Path(_PACKAGE_PARENT, "t5x").rglob("*.gin")):
        close = close or did_you_mean(Path(name).stem, {file.stem: display_path(str(file)) for file in files})
    looked = "".join(f"\n    {path}" for path in dict.fromkeys(paths))
    raise ConfigurationError(f"gin file {name!r} not found.{close} Searched:{looked}")


# --- `--gin.NAME=VALUE` arguments -------------------------------------------------------------------------------------


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


def _read_argument(binding: str) -> tuple[str, Origin]:
    """Return a binding as gin text, and its origin; a value that is not gin becomes a string.

    >>> _read_argument("MODEL_DIR = /tmp/run")[0]
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
