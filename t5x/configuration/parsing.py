"""Reads gin files and bindings, statement by statement, so that every error can say where it comes from."""

from __future__ import annotations

import io
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from gin import config, config_parser

from t5x.configuration import session as sessions
from t5x.configuration import signatures
from t5x.configuration.arguments import as_statements
from t5x.configuration.errors import ConfigurationError, Origin, Problem, display_path, join_problems
from t5x.configuration.files import find
from t5x.configuration.imports import DEFAULT_ALIASES
from t5x.configuration.names import Context
from t5x.configuration.session import MACRO, Session

_HEADLINE = "The configuration cannot be read"


def parse(
    *,
    gin_files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (".",),
    entry_points: Mapping[str, Callable[..., Any]],
    aliases: Mapping[str, str] = DEFAULT_ALIASES,
) -> None:
    """Reads gin files, then bindings, and adds them to the configuration; a later binding wins.

    Args:
      gin_files: paths, looked for in the working directory, `search_paths`, and beside the `t5x` package.
      bindings: `NAME = VALUE` each, as `split_gin_args` returns them; a value that is not gin is a string.
      search_paths: directories for gin files and includes; an include is also looked for beside its file.
      entry_points: what `import __main__ as …` offers, for example `{"train": t5x.train.train}`.
      aliases: packages that gin files may import although they are not installed, and the module that stands in.

    Raises:
      ConfigurationError: with every unknown name and parameter. Nothing of this call is then kept.
    """
    gin_files = [gin_files] if isinstance(gin_files, str) else gin_files
    with sessions.LOCK:
        saved = sessions.snapshot()
        reader = _Reader(sessions.begin(entry_points, aliases), search_paths)
        try:
            for name in gin_files:
                reader.read_file(name)
            reader.read_bindings(bindings)
            if reader.problems:
                raise join_problems(reader.problems, _HEADLINE)
        except BaseException:
            sessions.restore(saved)
            raise


class _Unknown:
    """Stands for a reference that could not be resolved, until the binding that holds it is reported."""

    def __init__(self, problem: str):
        self.problem = problem


class _Delegate(config.ParserDelegate):
    def __init__(self, session: Session):
        super().__init__()
        self._session = session

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Any:
        try:
            reference = config.ConfigurableReference(scoped_selector, evaluate)
        except Problem as problem:
            return _Unknown(str(problem))
        self._session.references.append(reference)
        return reference

    def macro(self, name: str) -> Any:
        try:
            return super().macro(name)
        except ValueError as error:
            return _Unknown(str(error))


class _Reader:
    """One call of `parse`."""

    def __init__(self, session: Session, search_paths: Sequence[str]):
        self.problems: list[str] = []
        self._session = session
        self._search_paths = search_paths
        self._open: list[str] = []
        self._reported: set[tuple[str | None, str]] = set()

    def read_file(self, name: str, included_at: Origin | None = None) -> None:
        prefix = f"{included_at}: " if included_at else ""
        try:
            path = find(name, self._search_paths, included_at.path if included_at else None)
        except Problem as problem:
            self._stop(f"{prefix}{problem}")
        real = os.path.realpath(path)
        if real in self._open:
            chain = [*self._open[self._open.index(real) :], real]
            self._stop(f"{prefix}the files include each other: {' -> '.join(map(display_path, chain))}.")
        try:
            with open(path, encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            self._stop(f"{prefix}gin file {display_path(path)} cannot be read: {error}.")
        self._open.append(real)
        lines = text.splitlines()

        def origin(line: int) -> Origin:
            return Origin(path, line, lines[line - 1] if 0 < line <= len(lines) else "")

        self._read(text, origin)
        self._open.pop()

    def read_bindings(self, bindings: Sequence[str]) -> None:
        for binding in bindings:
            try:
                text, given = as_statements(binding)
            except ConfigurationError as error:
                self.problems.append(str(error))
                continue
            self._read(text, lambda line, given=given: given)

    def _read(self, text: str, origin: Callable[[int], Origin]) -> None:
        context = Context(self._session)
        config._PARSE_CONTEXTS.append(context)
        try:
            for statement in self._statements(text, origin):
                self._apply(statement, context, origin(statement.location.line_num))
        finally:
            config._PARSE_CONTEXTS.pop()

    def _statements(self, text: str, origin: Callable[[int], Origin]) -> Iterator[Any]:
        try:
            yield from config_parser.ConfigParser(text, _Delegate(self._session))
        except SyntaxError as error:
            place = origin(error.lineno or 1)
            explanation = _explain_syntax(error, place, _open_bracket(text, error.lineno or 1))
            self._stop(f"{place}: {explanation}{place.quoted()}")
        except tokenize.TokenError as error:
            place = origin(_open_bracket(text, sys.maxsize) or error.args[1][0])
            self._stop(f"{place}: a bracket or a quote is opened here and never closed.{place.quoted()}")

    def _apply(self, statement: Any, context: Context, place: Origin) -> None:
        if isinstance(statement, config_parser.BindingStatement):
            self._bind(statement, context, place)
        elif isinstance(statement, config_parser.BlockDeclaration):
            self._configurable(statement.selector, context, place)
        elif isinstance(statement, config_parser.ImportStatement):
            try:
                context.process_import(statement)
            except Problem as problem:
                self._stop(f"{place}: {problem}", cause=problem.__cause__)
        else:
            self.read_file(statement.filename, included_at=place)

    def _bind(self, statement: config_parser.BindingStatement, context: Context, place: Origin) -> None:
        unknown = [item.problem for item in _unknown_in(statement.value)]
        self.problems.extend(f"{place}: {problem}{place.quoted()}" for problem in unknown)
        if not statement.arg_name:
            name = f"{statement.scope}/{statement.selector}" if statement.scope else statement.selector
            key = (name, MACRO, "value")
        else:
            configurable = self._configurable(statement.selector, context, place)
            if configurable is None or not self._has_parameter(configurable, statement, place):
                return
            key = (statement.scope, configurable.selector, statement.arg_name)
        if not unknown:
            self._session.bind(key, statement.value, place)

    def _configurable(self, selector: str, context: Context, place: Origin) -> config.Configurable | None:
        """What `selector` names; where that is unknown, the problem is noted once a file."""
        try:
            return context.get_configurable(selector)
        except Problem as problem:
            if (place.path, selector) not in self._reported:
                self._reported.add((place.path, selector))
                self.problems.append(f"{place}: {problem}{place.quoted()}")
            return None

    def _has_parameter(self, configurable: config.Configurable, statement: Any, place: Origin) -> bool:
        named, open_ended = signatures.bindable(configurable)
        if open_ended or statement.arg_name in named:
            return True
        there_are = signatures.describe_parameters(configurable, statement.arg_name)
        self.problems.append(
            f"{place}: `{statement.selector}` has no parameter `{statement.arg_name}`. {there_are}{place.quoted()}"
        )
        return False

    def _stop(self, problem: str, cause: BaseException | None = None) -> NoReturn:
        raise join_problems([*self.problems, problem], _HEADLINE) from cause


def _unknown_in(value: Any) -> Iterator[_Unknown]:
    if isinstance(value, _Unknown):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unknown_in(key)
            yield from _unknown_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _unknown_in(item)


def _explain_syntax(error: SyntaxError, place: Origin, bracket_line: int | None) -> str:
    word = re.search(r"Failed to parse token '(.+)'", error.msg)
    if word:
        word = word[1]
        return f"`{word}` is not a gin value. Write '{word}' for a string, %{word} for a macro, @{word} for a function."
    if place.text.lstrip().startswith(("import ", "from ")):
        return f"this import cannot be read ({error.msg.rstrip('.')}). One module a line: `from t5x import utils`."
    if error.msg.startswith("Expected ','") and bracket_line:
        return f"{error.msg[0].lower()}{error.msg[1:-1]}: the bracket of line {bracket_line} is still open."
    explanations = {
        "Unable to parse value.": "a value is missing or is not gin.",
        "Expected newline.": "there is more after the value. A gin value is a literal, a %macro or an @reference, "
        "without arithmetic.",
        "Couldn't parse statement, expected ':' or '='.": "expected `name = value`, `name:`, an import or an include.",
        "Unexpected token.": "expected `name = value`, `name:`, an import or an include.",
    }
    return explanations.get(error.msg, f"syntax error: {error.msg}")


def _open_bracket(text: str, line: int) -> int | None:
    """The line of the innermost bracket that was opened before `line` and is still open there."""
    stack: list[int] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.start[0] >= line:
                break
            if token.type == tokenize.OP and token.string in "([{":
                stack.append(token.start[0])
            elif token.type == tokenize.OP and token.string in ")]}" and stack:
                stack.pop()
    except (tokenize.TokenError, SyntaxError):
        pass
    return stack[-1] if stack else None
