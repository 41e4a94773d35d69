"""`t5x completion`: print the completion of verbs and options for a shell."""

import argparse
import shlex

from t5x.cli.parser import VerbParser, parser_of
from t5x.cli.verbs import VERBS

_BASH = """\
_t5x() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" = 1 ]; then words={verbs}
  elif [[ $word == -* ]]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _t5x t5x
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit -i }
autoload -U +X bashcompinit && bashcompinit
"""


def define(parser: VerbParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    parser.set_help(
        "Print the completion of verbs, options and file names for a shell.",
        """
        eval "$(t5x completion bash)"                                    # in ~/.bashrc; zsh: ~/.zshrc
        t5x completion fish > ~/.config/fish/completions/t5x.fish
        """,
    )


def run(args: argparse.Namespace) -> None:
    print(completion(args.shell), end="", flush=True)


def completion(shell: str) -> str:
    """Return the script that the shell evaluates."""
    parsers = {verb: parser_of(verb) for verb in VERBS}
    if shell == "fish":
        lines = [f"complete -c t5x -n __fish_use_subcommand -fa {shlex.quote(' '.join(VERBS))}"]
        for verb, parser in parsers.items():
            for action in parser._actions:
                for name in (name for name in action.option_strings if name.startswith("--")):
                    value = "-r" if action.nargs != 0 else ""
                    if action.choices:
                        value = f"-xa {shlex.quote(' '.join(map(str, action.choices)))}"
                    when = f"'__fish_seen_subcommand_from {verb}'"
                    lines.append(f"complete -c t5x -n {when} -l {name[2:]} {value}".rstrip())
        return "\n".join(lines) + "\n"
    cases = []
    for verb, parser in parsers.items():
        names = [name for name in parser._option_string_actions if name.startswith("--")]
        cases.append(f"      {verb}) words={shlex.quote(' '.join(names))};;")
    script = _BASH.format(verbs=shlex.quote(" ".join(VERBS)), cases="\n".join(cases))
    return script if shell == "bash" else _ZSH + script
