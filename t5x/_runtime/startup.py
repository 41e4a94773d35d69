"""First steps of every entry point: readable logging, and JAX's own flags."""

import logging
import os
import sys
from collections.abc import Sequence

from t5x._runtime.errors import UserError


def configure_logging(*, debug: bool) -> None:
    """Log t5x's messages to standard error without prefixes; other libraries' only from warnings on."""
    root_handler, t5x_handler = _AboveBar(sys.stderr), _AboveBar(sys.stderr)
    root_handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    t5x_handler.setFormatter(MessageFormatter())
    root, t5x = logging.getLogger(), logging.getLogger("t5x")
    root.handlers[:], t5x.handlers[:] = [root_handler], [t5x_handler]
    t5x.propagate = False
    t5x.setLevel(logging.DEBUG if debug else logging.INFO)


def set_verbosity(level: int | None) -> None:
    """Log t5x's messages from this level on; None changes nothing."""
    if level is not None:
        logging.getLogger("t5x").setLevel(level)


class _AboveBar(logging.StreamHandler):
    """A handler that prints above a progress bar, if one is shown, instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
        # Without a bar, tqdm would first create its locks, and lose a Ctrl-C that comes meanwhile.
        if bar is None or not getattr(bar, "_instances", None):
            return super().emit(record)
        try:
            bar.write(self.format(record), file=self.stream)
        except Exception:
            self.handleError(record)
        return None


class MessageFormatter(logging.Formatter):
    """A formatter that adds the level only to warnings and errors, and a prefix to all messages."""

    def __init__(self, prefix: str = ""):
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{level}{self._prefix}{super().format(record)}"


def command(name: str) -> str:
    """Return a command of this environment as the user can type it: with its path if it is not on PATH."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), name)
    relative = os.path.relpath(beside)
    on_path = any(os.path.join(d, name) == beside for d in os.environ.get("PATH", "").split(os.pathsep))
    return name if on_path or not os.path.exists(beside) else min(relative, beside, key=len)


def set_jax_flags(argv: Sequence[str]) -> list[str]:
    """Apply JAX's own flags, `--jax_NAME=VALUE` and `--jax_NAME`, and return the other arguments.

    Raises:
      UserError: JAX has no such flag, or refuses the value.
    """
    jax_flags = [argument for argument in argv if argument.startswith("--jax_")]
    if jax_flags:
        import jax

        for argument in jax_flags:
            name, equals, text = argument[2:].partition("=")
            try:
                kind = type(jax.config.values[name])
                value = not equals or text.lower() in ("true", "1") if kind is bool else text
                jax.config.update(name, kind(value) if kind in (int, float) else value)
            except KeyError:
                raise UserError(f"{argument}: JAX {jax.__version__} has no flag {name}.") from None
            except ValueError as error:
                raise UserError(f"{argument}: {error}") from error
    return [argument for argument in argv if argument not in jax_flags]
