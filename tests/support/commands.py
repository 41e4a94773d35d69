"""Running the command line in this process: what a user sees of it, without the seconds that a new Python takes."""

import dataclasses
import io
import logging
import signal
import sys

from t5x import configuration
from t5x.cli import main


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def refused(self, *words: str) -> None:
        """Asserts that it ended with one message for the user that has these words, and no traceback."""
        assert self.code == 2, self.err
        assert self.err.count("error: ") == 1 and "Traceback" not in self.err, self.err
        for word in words:
            assert word in self.err, self.err


def run(capsys, verb: str, *args: object, text: str | None = None, program=main.run_verb) -> Result:
    """Runs `t5x VERB ARGS` with a configuration of its own; signal handlers and logging are afterwards as they were.

    Args:
      text: what it reads from standard input.
      program: called with the verb and its arguments.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    loggers = [logging.getLogger(), logging.getLogger("t5x")]
    logs = [(log, log.handlers[:], log.propagate, log.level) for log in loggers]
    capsys.readouterr()
    configuration.clear()
    stdin = sys.stdin
    if text is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    try:
        code = program(verb, [str(arg) for arg in args])
    except SystemExit as error:
        code = error.code
    finally:
        sys.stdin = stdin
        configuration.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for log, log_handlers, propagate, level in logs:
            log.handlers[:], log.propagate = log_handlers, propagate
            log.setLevel(level)  # also clears what loggers below have cached
    return Result(code, *capsys.readouterr())
