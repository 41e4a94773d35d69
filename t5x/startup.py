"""First steps of every entry point: readable logging, and JAX's compilation cache."""

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Sequence

from t5x.errors import UserError


def configure_logging(*, debug: bool) -> None:
    """Log t5x's messages to standard error without prefixes; other libraries' only from warnings on."""
    handler, own = _AboveBar(sys.stderr), _AboveBar(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    own.setFormatter(_Formatter())
    root, t5x = logging.getLogger(), logging.getLogger("t5x")
    root.handlers[:], t5x.handlers[:] = [handler], [own]
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


class _Formatter(logging.Formatter):
    """A formatter that adds the level only to warnings and errors, and a prefix to all messages."""

    def __init__(self, prefix: str = ""):
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{level}{self._prefix}{super().format(record)}"


def name_process() -> None:
    """Make all processes but the first log only warnings and errors (or all, if debugging), with their index."""
    from t5x.partitioning import distributed

    if distributed.is_leader():
        return
    own = logging.getLogger("t5x")
    own.setLevel(max(own.level, logging.WARNING) if own.level != logging.DEBUG else logging.DEBUG)
    for handler in own.handlers:
        handler.setFormatter(_Formatter(f"[process {distributed.process_index()}] "))


def command(name: str) -> str:
    """Return a command of this environment as the user can type it: with its path if it is not on PATH."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), name)
    relative = os.path.relpath(beside)
    on_path = any(os.path.join(d, name) == beside for d in os.environ.get("PATH", "").split(os.pathsep))
    return name if on_path or not os.path.exists(beside) else min(relative, beside, key=len)


def enable_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user set JAX_COMPILATION_CACHE_DIR.

    On GPUs a recompiled program may round differently, because matmul algorithms are autotuned.
    """
    import jax

    from t5x.files import cache_directory

    if jax.config.values["jax_compilation_cache_dir"] is None:
        # A program compiled for one processor may not run on another that shares the home directory.
        machine = hashlib.sha256("".join(_processor()).encode()).hexdigest()[:12]
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache_directory.root(), "xla", machine))


def set_jax_flags(argv: Sequence[str]) -> list[str]:
    """Apply JAX's own flags, `--jax_NAME=VALUE` and `--jax_NAME`, and return the other arguments.

    Raises:
      UserError: JAX has no such flag, or refuses the value.
    """
    given = [argument for argument in argv if argument.startswith("--jax_")]
    if given:
        import jax

        for argument in given:
            name, equals, text = argument[2:].partition("=")
            try:
                kind = type(jax.config.values[name])
                value = not equals or text.lower() in ("true", "1") if kind is bool else text
                jax.config.update(name, kind(value) if kind in (int, float) else value)
            except KeyError:
                raise UserError(f"{argument}: JAX {jax.__version__} has no flag {name}.") from None
            except ValueError as error:
                raise UserError(f"{argument}: {error}") from error
    return [argument for argument in argv if argument not in given]


def _processor() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))}
    except OSError:
        lines = set()
    return [platform.machine(), *sorted(lines)]
