"""Worker processes: fresh interpreters that are sent work over a pipe. Nothing is forked."""

import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from typing import Any, BinaryIO

from t5x.data.config import imported_task_modules
from t5x.errors import UserError

_LENGTH = struct.Struct("<Q")


def start(call: str) -> subprocess.Popen:
    """A process that runs a function of t5x, such as "t5x.data.workers:serve", with pipes to talk to it."""
    import t5x

    root = os.path.dirname(os.path.dirname(os.path.abspath(t5x.__file__)))
    module, function = call.split(":")
    command = [sys.executable, "-c", f"import {module}; {module}.{function}()"]
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def pickled(value: Any, instead: str) -> bytes:
    """A value that holds a user's functions, for `unpickled` in a worker.

    Args:
      instead: what to do if that is impossible, for the message.
    """
    import cloudpickle

    # They may not be importable by name.
    modules = [module for module in imported_task_modules() if sys.modules.get(module.__name__) is module]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((list(sys.path), cloudpickle.dumps(value)))
    except Exception as error:
        raise UserError(
            f"The task cannot be sent to worker processes ({type(error).__name__}: {error}). {instead}, or take out of "
            "its preprocessors and source what cannot be pickled."
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def unpickled(content: bytes) -> Any:
    """In a worker, what `pickled` was given; modules are found where the parent finds them."""
    import cloudpickle

    path, value = cloudpickle.loads(content)
    sys.path[:] = path
    return cloudpickle.loads(value)


def why_ended(process: subprocess.Popen) -> str:
    """Of a process that ended though nobody told it to."""
    code = process.wait()
    return f"killed by signal {-code} (9: often for want of memory)" if code < 0 else f"exit code {code}"


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """A worker's (commands, answers). What a user's function prints goes to standard error from here on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=1 << 20)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Not sys.stdin itself: an interpreter that ends while a thread of it still reads from that aborts.
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb"), answers


def listen(source: BinaryIO) -> "queue.Queue[bytes]":
    """A worker's commands as they come; it ends when the parent is gone."""
    commands: queue.Queue[bytes] = queue.Queue()

    def read_all() -> None:
        while (command := read(source)) is not None:
            commands.put(command)
        os._exit(0)

    threading.Thread(target=read_all, daemon=True).start()
    return commands


def write(stream: BinaryIO, content: bytes) -> None:
    """Writes a message that `read` finds the end of."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)


def read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None
