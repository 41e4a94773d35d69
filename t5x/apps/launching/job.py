"""Shared by all engines: the options of every launch, its saved files, and calls of external programs."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t5x._runtime.errors import TemporaryError, UserError

_SECRET = re.compile(r"TOKEN(_|$)|SECRET|PASSW|CREDENTIAL|(^|_)(KEY|AUTH)S?(_|$)|API_?KEY", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*")


def add_arguments(parser: Any) -> None:
    """Add the options of every engine."""
    parser.add_argument("--name", metavar="NAME", help="of the job (the last part of MODEL_DIR, or the verb)")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE",
        help="set an environment variable for the processes; may be repeated; never a secret",
    )  # fmt: skip
    parser.add_argument("--save_to", metavar="DIR", help="for the files of this launch (runs/launch/NAME-TIME)")
    parser.add_argument("--dry_run", action="store_true", help="print and save what would run, and start nothing")
    parser.add_argument("--nocheck", action="store_true", help="do not check the configuration of the command first")


def option(command: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, `--NAME=VALUE` or `--NAME VALUE`, in a command line.

    >>> option(["train", "--gin.MODEL_DIR=runs/a"], "gin.MODEL_DIR", "model_dir")
    'runs/a'
    """
    last = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in names:
            last = value if equals else following
    return last.strip("\"'") if last else None


def model_dir(command: Sequence[str]) -> str | None:
    """Return the directory that the command writes to, if the command line names it."""
    return option(command, "gin.MODEL_DIR", "model_dir", "gin.EVAL_OUTPUT_DIR", "gin.INFER_OUTPUT_DIR", "output")


def require_shared_output(command: Sequence[str]) -> None:
    """Raise a UserError if the command writes to the disk of one machine. An absolute path may be a shared one."""
    directory = model_dir(command)
    if directory and "://" not in directory and not os.path.isabs(directory):
        raise UserError(
            f"The output directory {directory} would be on the disk of one machine, and lost with it. Use a bucket, as "
            "in --gin.MODEL_DIR=gs://bucket/runs/mine, or an absolute path that all machines share."
        )


def may_be_retried(status: int) -> bool:
    """Return whether a restart may help: after a signal or a dead process, but not after an error or Ctrl-C."""
    return status == 75 or (status >= 128 and status != 130)


def name_of(args: Any, command: Sequence[str]) -> str:
    """Return the name of the job: a letter, then letters, digits and hyphens, as every engine accepts it."""
    name = args.name or os.path.basename((model_dir(command) or command[0]).rstrip("/"))
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"t5x-{name}".strip("-")


def environment(args: Any) -> dict[str, str]:
    """Return the variables of --env. They are written to files, so names that look like secrets are refused."""
    variables = {}
    for setting in args.env:
        name, equals, value = setting.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UserError(f"--env is {setting!r}: it must be NAME=VALUE.")
        if _SECRET.search(name):
            raise UserError(
                f"--env {name} looks like a secret, and `t5x launch` writes no secrets to files. Set it where the "
                "processes run: export it before this command (local, slurm), or use the secrets of the cloud."
            )
        variables[name] = value
    return variables


def save(args: Any, command: Sequence[str], files: Mapping[str, str]) -> Path:
    """Write the files of a launch, print them, and return their directory.

    Args:
      files: {name: content}; a name that ends with .sh is made executable.
    """
    directory = save_directory(args, command)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = directory / name
            path.write_text(content)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
    except OSError as error:
        where = error.filename or directory
        raise UserError(f"{where} cannot be written ({error.strerror}). Pass another --save_to.") from error
    for name, content in files.items():
        print(f"# {directory / name}\n{content}", flush=True)
    return directory


def save_directory(args: Any, command: Sequence[str]) -> Path:
    """Return the directory for the files of this launch, the same in every call."""
    if not args.save_to:
        args.save_to = os.path.join("runs", "launch", f"{name_of(args, command)}-{time.strftime('%Y%m%d-%H%M%S')}")
    return Path(args.save_to)


def join_words(words: Sequence[str]) -> str:
    """Return a command for a shell, one option per line if it is long."""
    line = shlex.join(words)
    if len(line) <= 100:
        return line
    quoted = [shlex.quote(word) for word in words]
    return "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in quoted).lstrip()


def call(words: Sequence[str], *, needs: str, timeout: float = 120) -> str:
    """Run an external program and return its standard output.

    Args:
      needs: how to install the program, for the error message.

    Raises:
      TemporaryError: the program did not end in time.
      UserError: there is no such program, or it failed; the message has its output.
    """
    line = shlex.join(words)
    first = line.partition("\n")[0][:200]
    line = line if line == first else f"{first} …"
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except FileNotFoundError:
        raise UserError(f"There is no program {words[0]} here. {needs}") from None
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}. {needs}") from error
    with process:
        try:
            out, err = (text.decode(errors="replace") for text in process.communicate(timeout=timeout))
        except subprocess.TimeoutExpired:
            raise TemporaryError(f"`{line}` did not end within {timeout:.0f} s.") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its children, too, which keep the pipes open
    if process.returncode:
        printed = (err.strip() or out.strip() or "it printed nothing")[-2000:]
        raise UserError(f"`{line}` failed with exit status {process.returncode}: {printed}")
    return out
