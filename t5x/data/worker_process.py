"""Worker processes: new interpreters that receive work over a pipe. Nothing is forked."""

import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from typing import Any, BinaryIO

import t5x
from t5x import user_modules
from t5x.data.dataset_config import imported_task_modules
from t5x.errors import TemporaryError, UserError

_LENGTH = struct.Struct("<Q")
# Load the same t5x package as this process, without adding its parent directory to the path.
_LOAD_T5X = """\
import importlib.util, os.path, sys
spec = importlib.util.spec_from_file_location(
    "t5x", {file!r}, submodule_search_locations=[os.path.dirname({file!r})])
sys.modules["t5x"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["t5x"])
"""


def start(call: str) -> subprocess.Popen:
    """Start a process that runs a function of t5x, such as "t5x.data.batch_workers:serve", with pipes to it."""
    module, function = call.split(":")
    program = f"{_LOAD_T5X.format(file=os.path.abspath(t5x.__file__))}import {module}; {module}.{function}()"
    # Without -P, the working directory would come first on the path, and a user's queue.py would hide Python's.
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def pickled(value: Any, instead: str) -> bytes:
    """Pickle a value that holds a user's functions, for `unpickled` in a worker.

    Args:
      instead: what to do if that is impossible, for the message.
    """
    import cloudpickle

    # They may not be importable by name.
    modules = [module for module in imported_task_modules() if sys.modules.get(module.__name__) is module]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        # "" is the current working directory; it goes last so that nothing there hides a module.
        path = sorted(sys.path, key=lambda entry: entry == "")
        return cloudpickle.dumps((path, user_modules.snapshot(), cloudpickle.dumps(value)))
    except Exception as error:
        raise UserError(
            f"The task cannot be sent to worker processes ({type(error).__name__}: {error}). {instead}, or take out of "
            "its preprocessors and source what cannot be pickled."
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def unpickled(content: bytes) -> Any:
    """Return the value passed to `pickled`, in a worker; modules are found where the parent finds them."""
    import cloudpickle

    path, modules, value = cloudpickle.loads(content)
    sys.path[:] = path
    user_modules.restore(modules)
    return cloudpickle.loads(value)


def unexpected_end(process: subprocess.Popen, what: str, fix: str) -> UserError:
    """Return the error for a worker that has ended by itself, a TemporaryError if a signal killed it.

    Args:
      what: name of the worker.
      fix: how to avoid it, a sentence.
    """
    code = process.wait()
    if code < 0:
        return TemporaryError(f"{what} was killed by signal {-code} (9: often because memory ran out). {fix}")
    return UserError(f"{what} ended with exit code {code}; see its output above. {fix}")


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return a worker's (commands, answers). What a user's function prints goes to standard error from now on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=1 << 20)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Not sys.stdin itself: an interpreter aborts if it exits while a thread still reads from it.
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb"), answers


def listen(source: BinaryIO) -> "queue.Queue[bytes]":
    """Return a queue of a worker's commands; the worker exits when the parent is gone."""
    commands: queue.Queue[bytes] = queue.Queue()

    def read_all() -> None:
        while (command := read(source)) is not None:
            commands.put(command)
        os._exit(0)

    threading.Thread(target=read_all, daemon=True).start()
    return commands


def write(stream: BinaryIO, content: bytes) -> None:
    """Write a length-prefixed message for `read`."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)


def read(stream: BinaryIO) -> bytes | None:
    """Return the next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None
