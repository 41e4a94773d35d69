"""The `t5x` command: run a verb and turn errors into messages and exit codes."""

import os
import signal
import sys

# Before the other imports, during which Ctrl-C would show a traceback. Not if something else imports this module.
if os.path.basename(sys.argv[0]) in ("t5x", "-m"):
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"\ninterrupted\n"), os._exit(130)))

import contextlib
import enum
import errno
import gc
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from t5x._runtime import PACKAGE, __version__
from t5x._runtime.errors import UserError, did_you_mean
from t5x._runtime.signals import EXIT_CODES, Terminated, leave_at_once
from t5x.cli.verbs import VERBS, import_verb

USAGE = """\
usage: t5x VERB [options]

Train, fine-tune, evaluate and run T5-family models.

verbs:
{verbs}

examples:
  t5x demo
  t5x train --model google/flan-t5-small --data train.tsv --steps 1000 --model_dir runs/mine
  t5x train --gin_file=t5x/examples/demo/dates.gin --gin.MODEL_DIR=runs/dates --gin.TRAIN_STEPS=500
  echo "the third of March '97" | t5x infer --model runs/demo --input -
  t5x VERB --help
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    The exit code is 0, 2 for errors that the user can fix, 130 after Ctrl-C, or 75 (retry) after SIGTERM.
    """
    signal.signal(signal.SIGINT, leave_at_once)
    _search_working_directory_last()
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv[0] if argv else None
    if verb == "help" and len(argv) > 1:
        verb, argv = argv[1], [argv[1], "--help"]
    if verb in (None, "-h", "--help", "help"):
        with contextlib.suppress(BrokenPipeError):
            verbs = "\n".join(f"  {name:12}{summary}" for name, (_, summary) in VERBS.items())
            print(USAGE.format(verbs=verbs), flush=True)
        sys.exit(0)
    if verb == "--version":
        print(f"t5x {__version__}")
        sys.exit(0)
    if verb not in VERBS:
        hint = did_you_mean(verb, {name: f"t5x {name}" for name in VERBS} | {"bench": "python -m benchmarks.bench"})
        print(f"error: t5x has no verb {verb!r}.{hint} `t5x --help` lists them.", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_verb(verb, argv[1:], _end))


def main_of(verb: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a verb as `python -m t5x.train` or `python t5x/train.py` do, and exit."""
    # For a script, Python puts the package's directory first on the path, where our modules shadow other packages.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != PACKAGE]
    _search_working_directory_last()
    sys.exit(run_verb(verb, sys.argv[1:] if argv is None else argv, _end))


class RunMode(enum.Enum):
    """What `--run_mode` may be: the verb of the same name."""

    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"
    PRECOMPILE = "precompile"
    EXPORT = "export"


def run_mode_main(argv: Sequence[str]) -> NoReturn:
    """Run the verb that `--run_mode` names with the other arguments, as T5X's `main.py` does, and exit.

    Args:
      argv: name of the program, then arguments.
    """
    import argparse

    parser = argparse.ArgumentParser(prog="main.py", usage="main.py --run_mode=MODE [options]", allow_abbrev=False)
    parser.add_argument(
        "--run_mode", required=True, choices=[mode.value for mode in RunMode],
        help="the verb to run; `t5x MODE --help` shows its options",
    )  # fmt: skip
    args, verb_argv = parser.parse_known_args(argv[1:])
    main_of(args.run_mode, verb_argv)


def _search_working_directory_last() -> None:
    """Let a module of the working directory not take the place of an installed one.

    The directory is on the path if PYTHONPATH has an empty or relative entry, as `PYTHONPATH=$PYTHONPATH:lib` often
    does. An absolute entry is what the user wants.
    """
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = os.getcwd()
    if here not in python_path:
        last = [entry for entry in sys.path if os.path.abspath(entry or ".") == here]
        sys.path[:] = [entry for entry in sys.path if entry not in last] + last


def run_verb(verb: str, argv: Sequence[str], end: Callable[[int], int] = int) -> int:
    """Parse a verb's arguments and run it. Return the exit code; errors are printed.

    Args:
      end: called with the exit code after Ctrl-C or SIGTERM, while the exception is still alive.
    """
    signal.signal(signal.SIGINT, leave_at_once)
    signal.signal(signal.SIGTERM, leave_at_once)
    gc.disable()  # until `work_begins`: while modules are imported, it would look through all of them several times
    from t5x import configuration
    from t5x._runtime import startup
    from t5x.cli.parser import parser_of

    module = import_verb(verb)
    parser = parser_of(verb)
    end_of_options = argv.index("--") if verb == "launch" and "--" in argv else len(argv)
    argv, command = argv[:end_of_options], list(argv[end_of_options + 1 :])
    debug = "--debug" in argv
    startup.configure_logging(debug=debug)
    try:
        argv, bindings = configuration.split_gin_args(argv)
        args = parser.parse_args(startup.set_jax_flags(argv))
        startup.set_verbosity(getattr(args, "verbosity", None))
        if bindings and not hasattr(args, "gin_bindings"):
            raise UserError(f"`t5x {verb}` has no gin configuration: remove --gin.NAME=VALUE.")
        args.verb, args.command = verb, command
        args.gin_bindings = [*getattr(args, "gin_bindings", ()), *bindings]
        module.run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        _print_error("\ninterrupted")
        return end(EXIT_CODES[signal.SIGINT])
    except Terminated as error:
        return end(error.code)
    except Exception as error:
        root = configuration.root_cause(error)
        message = configuration.user_message(error)
        if isinstance(root, BrokenPipeError):
            _print_nowhere(sys.stdout)  # the reader closed the pipe
            return 1
        if message is None and isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT):
            _print_nowhere(sys.stdout)
            where = root.filename or "Standard output, or a file,"
            message = f"{where} cannot be written: {root.strerror}. Free disk space, then start again."
        if message is None and _is_out_of_memory(root):
            reason = (str(root).splitlines() or [type(root).__name__])[0]
            message = (
                f"Out of memory ({reason}). Lower the batch size, the lengths or the number of beams. In training, "
                "raise trainer.Trainer.num_microbatches."
            )
        if message is None and hasattr(root, "exit_code"):  # an orderly stop, not an error
            _print_error(str(root))
            return root.exit_code
        if debug or message is None:
            raise
        _print_error(f"error: {message}")
        return getattr(root, "exit_code", 2)
    finally:
        gc.enable()


def _end(code: int) -> NoReturn:
    """Exit at once, while the exception that a signal raised is still alive.

    XLA may still be compiling in a thread that signals do not stop. Python's normal exit would wait for it, and freeing
    the exception's frames would free memory that it uses. Functions registered with `atexit` do not run; `with` and
    `finally` blocks have run already.
    """
    import logging

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: os._exit(code))
    if multiprocess := sys.modules.get("t5x.partitioning.multiprocess"):
        multiprocess.at_exit()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the host or a device ran out of memory. JAX's errors are matched by name to avoid the import."""
    of_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return isinstance(error, MemoryError) or (of_jax and "RESOURCE_EXHAUSTED" in str(error))


def _print_nowhere(stream: TextIO) -> None:
    """Redirect standard output or error to /dev/null, so that Python does not try to flush it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(text: str) -> None:
    """Print to standard error, if it is still open."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _print_nowhere(sys.stderr)  # a failed flush at exit would change the exit code to 120
