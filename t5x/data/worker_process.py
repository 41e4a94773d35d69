"""Worker processes: new interpreters, without JAX, that exchange messages with this process. Nothing is forked.

Commands and answers are values that `example_encoding` stores. Only the work, which holds functions of the user, is
pickled, from the parent to the worker.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from t5x._runtime import PACKAGE, imports
from t5x._runtime.errors import TemporaryError, UserError
from t5x.data import example_encoding
from t5x.data.dataset_config import imported_task_modules
from t5x.data.sources import BadExample

_STDERR = 2
_ERRORS = {"bad": BadExample, "user": UserError, "bug": RuntimeError}
# Load the same t5x package as this process, without adding its parent directory to the path.
_SERVE = """\
import importlib.util, os.path, sys
spec = importlib.util.spec_from_file_location(
    "t5x", os.path.join({package!r}, "__init__.py"), submodule_search_locations=[{package!r}])
sys.modules["t5x"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["t5x"])
from {module} import {function}
from {serve} import serve
serve({function}, {channel})
"""

Run = Callable[[Any, Any, "Parent"], None]


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(run: Run, channel: int) -> subprocess.Popen[bytes]:
    """Start a process that calls `serve(run, channel)`; `run` is a function of a module of t5x."""
    program = _SERVE.format(
        package=PACKAGE, module=run.__module__, function=run.__name__, serve=__name__, channel=channel
    )
    # Without -P, the working directory would come first on the path, and a user's queue.py would hide Python's.
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=[channel])


class Worker:
    """A worker process, seen from its parent.

    Args:
      run: what the worker runs, see `serve`.
      work: what the worker needs, from `pickled`.
      name: name of the worker in error messages.
      fix: how to avoid its unexpected end, a sentence.
    """

    def __init__(self, run: Run, work: bytes, name: str, fix: str):
        self._channel, of_worker = Pipe()
        with of_worker:
            self._process = start(run, of_worker.fileno())
        self._unsent_work: bytes | None = work
        self._name, self._fix = name, fix
        self._commands = 0

    def send(self, command: Any) -> None:
        """Send a command. Waits for the worker to start; if it has died, `receive` raises the error."""
        self._commands += 1
        with contextlib.suppress(OSError):
            if self._unsent_work is not None:
                self._channel.send_bytes(self._unsent_work)
                self._unsent_work = None
            self._channel.send_bytes(example_encoding.pack(command))

    def receive(self) -> Any:
        """Return the next answer to the last command; raise the worker's error if it had one."""
        command = None
        while command != self._commands:
            try:
                content = self._channel.recv_bytes()
            except (EOFError, OSError):
                raise self._died() from None
            command, error, answer = example_encoding.decode(content)
        if error is not None:
            raise _ERRORS[error](answer)
        return answer

    def stop(self) -> None:
        # The channel is closed with this object: a thread may still read from it.
        self._process.kill()
        self._process.wait()

    def _died(self) -> UserError:
        code = self._process.wait()
        if code < 0:
            return TemporaryError(
                f"{self._name} was killed by signal {-code} (signal 9 often means that memory ran out). {self._fix}"
            )
        return UserError(f"{self._name} ended with exit code {code}; see its output above. {self._fix}")


class Parent:
    """The parent process, seen from a worker, which exits when the parent is gone.

    Args:
      channel: file descriptor of the connection to it.

    Attributes:
      work: argument of `Worker`.
    """

    def __init__(self, channel: int):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides when to stop
            signal.signal(number, signal.SIG_IGN)
        self._channel = Connection(channel)
        self._received: queue.Queue[bytes] = queue.Queue()
        self._command = 0
        threading.Thread(target=self._listen, daemon=True).start()
        self.work = self._received.get()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._received.put(self._channel.recv_bytes())
        os._exit(0)

    def has_command(self) -> bool:
        return not self._received.empty()

    def newest_command(self) -> Any:
        """Wait for a command; return the last one sent."""
        content = None
        while content is None or self.has_command():
            content = self._received.get()
            self._command += 1
        return example_encoding.decode(content)

    def send(self, answer: Any, error: str | None = None) -> None:
        """Answer the last command, or report an error: a key of `_ERRORS`, with its message as the answer."""
        content = example_encoding.pack([self._command, error, answer])
        try:
            self._channel.send_bytes(content)
        except ConnectionError:
            os._exit(0)


def serve(run: Run, channel: int) -> None:
    """Run a worker: call `run(work, command, parent)` for each command; it answers with `parent.send`."""
    parent = Parent(channel)
    work = None
    while True:
        command = parent.newest_command()
        try:
            work = unpickled(parent.work) if work is None else work
            run(work, command, parent)
        except UserError as error:
            parent.send(str(error), "bad" if isinstance(error, BadExample) else "user")
        except Exception:
            parent.send(f"in a worker process:\n{traceback.format_exc()}", "bug")


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
        return cloudpickle.dumps((path, imports.snapshot(), cloudpickle.dumps(value)))
    except Exception as error:
        raise UserError(
            f"The task cannot be sent to worker processes ({type(error).__name__}: {error}). {instead}, or remove what "
            "cannot be pickled from its preprocessors and source."
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def unpickled(content: bytes) -> Any:
    """Return the value passed to `pickled`, in a worker; modules are found where the parent finds them."""
    import cloudpickle

    path, modules, value = cloudpickle.loads(content)
    sys.path[:] = path
    imports.restore(modules)
    return cloudpickle.loads(value)
