"""The argument parser of a verb: short help pages, and errors of one line with the closest valid option."""

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from t5x._runtime.errors import UserError, did_you_mean
from t5x.cli.verbs import import_verb

_TRUE, _FALSE = ("true", "t", "1", "yes", "y"), ("false", "f", "0", "no", "n")


class VerbParser(argparse.ArgumentParser):
    """A parser whose `--help` shows the main options; groups for fewer users have pages of their own, `--help TOPIC`.

    Attributes:
      topics: {name of a page: the group of options on it}.
    """

    def __init__(self, verb: str):
        super().__init__(
            prog=f"t5x {verb}", usage=f"t5x {verb} [options]", allow_abbrev=False, add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.topics: dict[str, Any] = {}
        hidden = argparse.SUPPRESS  # named at the end of the page
        self.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC", action=_Help, help=hidden)
        self.add_argument("--debug", action="store_true", help=hidden)

    def add_topic(self, name: str, title: str, description: str | None = None) -> Any:
        """Return a group of options that `--help NAME` shows, instead of `--help`."""
        self.topics[name] = self.add_argument_group(title, description)
        return self.topics[name]

    def set_help(self, description: str, examples: str) -> None:
        """Set the texts before and after the options."""
        self.description = textwrap.fill(description, 100)
        self.epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")

    def format_page(self, topic: str) -> str:
        """Return a page of the help; the main one if `topic` is empty."""
        if topic and topic not in self.topics:
            self.error(f"there is no help about {topic!r}; topics: {', '.join(self.topics) or 'none'}")
        page = self._get_formatter()
        if not topic:
            page.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
            page.add_text(self.description)
        of_topics = [id(group) for group in self.topics.values()]
        for group in [self.topics[topic]] if topic else self._action_groups:
            if topic or id(group) not in of_topics:
                page.start_section(group.title)
                page.add_text(group.description)
                page.add_arguments(group._group_actions)
                page.end_section()
        if not topic:
            page.add_text(self.epilog)
            more = f"more options: --help {' | '.join(self.topics)}; " if self.topics else ""
            page.add_text(f"{more}--debug shows tracebacks")
        return page.format_help()

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        parsed, unknown = self.parse_known_args([self._without_value(word) for word in words], namespace)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            self.error(self._unknown(word.partition("=")[0]))
        return parsed

    def _without_value(self, word: str) -> str:
        """Return absl's `--name=true` as `--name`, and `--name=false` as `--noname`, if that is a flag."""
        name, equals, value = word.partition("=")
        opposite = f"--no{name[2:]}"
        if not equals or opposite not in self._option_string_actions:
            return word
        if value.lower() not in (*_TRUE, *_FALSE):
            self.error(f"{name} is {value!r}: it must be true or false")
        return name if value.lower() in _TRUE else opposite

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        end = "" if message.endswith((".", "?")) else "."
        raise UserError(f"{message}{end} `{self.prog} --help` shows the options and examples.")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        if word.startswith("--fdl_"):
            return f"`{self.prog}` has no option {word}: Fiddle is not supported. Use gin files"
        names = [name for name in self._option_string_actions if name.startswith("--")]
        close = did_you_mean("--" + word.lstrip("-").replace("-", "_"), names)
        return f"`{self.prog}` has no option {word}.{close}"


def parser_of(verb: str) -> VerbParser:
    """Return the parser of a verb, with its options."""
    parser = VerbParser(verb)
    import_verb(verb).define(parser)
    return parser


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, VerbParser)
        print(parser.format_page(values or ""), end="", flush=True)
        parser.exit()


# --- Options as fields of a dataclass ---------------------------------------------------------------------------------


def option(metavar: str, help_: str, default: Any = None, **settings: Any) -> Any:
    """Return a dataclass field that `add_options` offers as `--FIELD METAVAR`.

    Args:
      metavar: N is an integer, X a number, anything else a string.
      settings: further arguments of argparse; `also` has more names of the option.
    """
    settings = {"metavar": metavar, "help": help_, "type": {"N": int, "X": float}.get(metavar, str), **settings}
    return dataclasses.field(default=default, metadata=settings)


def choice(choices: Sequence[str], help_: str, default: Any = None) -> Any:
    """Return a dataclass field whose option has one of these values."""
    return dataclasses.field(default=default, metadata={"choices": choices, "help": help_})


def flag(help_: str) -> Any:
    """Return a dataclass field whose option has no value."""
    return dataclasses.field(default=False, metadata={"action": "store_true", "help": help_})


def add_options(group: Any, options: type, first: Sequence[str] = ()) -> None:
    """Add an option for every field of a dataclass, those in `first` before the others."""
    for field in sorted(dataclasses.fields(options), key=lambda field: field.name not in first):
        settings = dict(field.metadata)
        names = [f"--{field.name}", *settings.pop("also", ())]
        group.add_argument(*names, dest=field.name, default=None, **settings)


def passed_options(args: argparse.Namespace, *options: type) -> dict[str, Any]:
    """Return those options of these dataclasses that the user passed."""
    names = [field.name for kind in options for field in dataclasses.fields(kind)]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
