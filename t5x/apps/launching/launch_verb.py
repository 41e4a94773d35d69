"""The verb `t5x launch`: its engines, and the check of the command that they start."""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence

from t5x._runtime.errors import UserError
from t5x.apps.launching import ENGINES, job
from t5x.cli.parser import VerbParser, parser_of
from t5x.cli.verbs import VERBS

_SET_BY_ENGINE = ("--coordinator_address", "--process_count", "--process_index")


def define(parser: VerbParser) -> None:
    parser.usage = "t5x launch ENGINE [options] -- VERB …"
    parser.add_argument("engine", metavar="ENGINE", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_help(
        "Start a t5x command on several processes, machines or a cluster. `t5x launch ENGINE --help` shows the options "
        "of an engine. The run is checked first; what is submitted is printed and saved; --dry_run stops there.",
        """
        t5x launch local --processes 2 -- train --gin_file=my_run.gin --gin.MODEL_DIR=runs/mine
        t5x launch slurm --nodes 2 --gpus_per_node 8 -- train --gin_file=my_run.gin --gin.MODEL_DIR=runs/mine
        """,
    )
    engines = "\n".join(f"  {name:10}{purpose}" for name, purpose in ENGINES.items())
    parser.epilog = f"engines:\n{engines}\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> None:
    if args.engine not in ENGINES:
        problem = f"there is no engine {args.engine!r}" if args.engine else "ENGINE is missing"
        raise UserError(f"`t5x launch`: {problem}. Engines: {', '.join(ENGINES)}.")
    engine = importlib.import_module(f"t5x.apps.launching.{args.engine}")
    parser = VerbParser(f"launch {args.engine}")
    parser.usage = f"t5x launch {args.engine} [options] -- VERB …"
    parser.description = (engine.__doc__ or "").strip()
    engine.add_arguments(parser)
    job.add_arguments(parser.add_argument_group("all engines"))
    options = parser.parse_args(args.options)
    command = _check_command(args.command, with_configuration=not options.nocheck)
    sys.exit(engine.launch(options, command))


def _check_command(command: list[str], *, with_configuration: bool) -> list[str]:
    """Return the command as a verb and its options. Raise a UserError if it would fail in every process."""
    if command and command[0] == "t5x":
        command = command[1:]
    if command and command[0].startswith("--"):  # options of T5X's main.py
        main = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        main.add_argument("--run_mode")
        parsed, options = main.parse_known_args(command)
        command = [parsed.run_mode, *options] if parsed.run_mode else []
    if not command:
        raise UserError("There is no command: write what to run after ` -- `, as in `-- train --gin_file=my_run.gin`.")
    verb, words = command[0], command[1:]
    if verb not in VERBS:
        raise UserError(f"t5x has no verb {verb!r} (after ` -- `). `t5x --help` lists them.")
    parser = parser_of(verb)
    if "--process_count" not in parser._option_string_actions:
        raise UserError(f"`t5x {verb}` cannot be launched: it runs in one process. Start it directly.")
    from t5x import configuration

    words, bindings = configuration.split_gin_args(words)
    args = parser.parse_args([word for word in words if not word.startswith("--jax_")])
    for name in _SET_BY_ENGINE:
        if getattr(args, name[2:]) is not None:
            raise UserError(f"Remove {name} from the command: `t5x launch` sets it.")
    uses_gin = bool(getattr(args, "gin_file", ()) or bindings)
    if with_configuration and "--dry_run" in parser._option_string_actions and (uses_gin or verb == "train"):
        _check_configuration(command)
    return command


def _check_configuration(command: Sequence[str]) -> None:
    """Run the command with --dry_run in a process of its own, without touching devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "t5x", *command, "--dry_run"]
    process = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    messages, _, reason = process.stderr.rpartition("error: ") if process.returncode else (process.stderr, "", "")
    print(messages, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise UserError(f"{reason.strip()}\nEvery process would fail like this, so none is started (unless --nocheck).")
