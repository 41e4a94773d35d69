"""The `t5x` command: finds the verb, runs it, and turns every error into a message and an exit code."""

import contextlib
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from t5x import __version__
from t5x.errors import UserError
from t5x.verbs import VERBS
from t5x.verbs.arguments import Terminated, parser_of

USAGE = """\
Train, fine-tune, evaluate and run T5-family models.

verbs:
  demo    train a tiny T5 on this machine in a few minutes, and see it work
  train   pretrain or fine-tune, as gin files say or from a plain file
  data    show what a task or a file becomes, and how long its examples are
  eval    score a checkpoint, or all of a run, with a task's metrics
  infer   write a model's predictions or scores for a file or a task
  answer  answer questions about texts, with the answer's place in them
  rerank  order passages by how relevant a model says they are
  rank-eval
          score runs with judgments: MRR, nDCG, MAP, and whether they differ
  inspect say what a checkpoint is, whatever its format
  cache   write a task's tokenised examples once; training then reads them
  convert convert a checkpoint: to ours, native T5X or Hugging Face
  bench   measure training, generation, scoring and more on this machine

examples:
  t5x demo
  t5x train --gin_file=t5x/examples/demo/dates.gin --gin.MODEL_DIR=/tmp/dates --gin.TRAIN_STEPS=500
  t5x train --gin_file=my_run.gin --dry_run
  t5x train --model flan-t5-small --data train.jsonl --valid valid.jsonl --steps 1000 --model_dir runs/mine
  t5x infer --model runs/demo --input dates.txt --output predictions.jsonl
  t5x VERB --help
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0; 2 for what the user can mend; 130 and 75 after Ctrl-C and SIGTERM."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv[0] if argv else None
    if verb == "help" and len(argv) > 1:
        verb, argv = argv[1], [argv[1], "--help"]
    if verb in (None, "-h", "--help", "help"):
        with contextlib.suppress(BrokenPipeError):
            print("usage: t5x VERB [options]\n\n" + USAGE, flush=True)
        sys.exit(0)
    if verb == "--version":
        print(f"t5x {__version__}")
        sys.exit(0)
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f" Did you mean `t5x {near[0]}`?" if near else ""
        print(f"error: t5x has no verb {verb!r}.{hint} `t5x --help` lists them.", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_verb(verb, argv[1:], _end))


def main_of(verb: str) -> NoReturn:
    """What `python -m t5x.train` and `python t5x/train.py` run."""
    package = os.path.dirname(os.path.abspath(__file__))
    # Started as a script, Python put the package's own directory first on the path, where our modules shadow others'.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != package]
    sys.exit(run_verb(verb, sys.argv[1:], _end))


def run_verb(verb: str, argv: Sequence[str], end: Callable[[int], int] = int) -> int:
    """Parses a verb's arguments and runs it; every error becomes a message and an exit code.

    Args:
      end: is given the exit code after Ctrl-C and SIGTERM, as long as what they have raised is there.
    """
    signal.signal(signal.SIGTERM, _leave_at_once)
    signal.signal(signal.SIGINT, _leave_at_once)
    from t5x import configuration, startup

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a gin file's `import my_tasks` finds my_tasks.py here
    module = importlib.import_module(f"t5x.verbs.{verb.replace('-', '_')}")
    parser = parser_of(verb)
    module.define(parser)
    debug = "--debug" in argv
    startup.configure_logging(debug=debug)
    try:
        argv, bindings = configuration.split_gin_args(argv)
        args = parser.parse_args(argv)
        if bindings and not hasattr(args, "gin_bindings"):
            raise UserError(f"`t5x {verb}` takes no gin configuration: leave out --gin.….")
        args.gin_bindings = [*getattr(args, "gin_bindings", ()), *bindings]
        module.run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        _say("\ninterrupted")
        return end(130)
    except Terminated as error:
        return end(error.code)
    except Exception as error:
        root = configuration.root_cause(error)
        message = configuration.user_message(error)
        if isinstance(root, BrokenPipeError):
            _print_nowhere()  # the reader went away: nothing to tell it
            return 1
        if message is None and isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT):
            _print_nowhere()
            where = root.filename or "Standard output, or a file,"
            message = f"{where} cannot be written: {root.strerror}. Free disk space, then start again."
        if message is None and hasattr(root, "exit_code"):  # stopped in good order
            _say(str(root))
            return root.exit_code
        if debug or message is None:
            raise
        _say(f"error: {message}")
        return getattr(root, "exit_code", 2)


def _end(code: int) -> NoReturn:
    """Ends the process while the exception that a signal raised is still there, and without Python's own end.

    The signal does not stop XLA, which compiles in a thread of its own: Python's end waits for that, and what it
    compiles would be freed under its hands with the exception's frames. Functions that are registered with `atexit` are
    not called; what `with` and `finally` clean up has been.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: os._exit(code))
    if distributed := sys.modules.get("t5x.partitioning.distributed"):
        distributed.at_exit()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _print_nowhere() -> None:
    """What standard output would not take is not written again when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    """To standard error, if anybody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _leave_at_once(signum: int, frame: FrameType | None) -> None:
    """A signal while nothing has been done yet. Training has a handler of its own, which saves."""
    _say("\ninterrupted" if signum == signal.SIGINT else "terminated")
    os._exit(130 if signum == signal.SIGINT else 75)
