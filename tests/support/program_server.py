"""Runs Python programs in forks of one process that has imported what they need:

    python program_server.py SOCKET OWNER MODULE…

Imports the modules, then listens at the Unix socket until the process OWNER ends. A request is a JSON object {"argv",
"cwd", "env"} with the descriptors of standard input, output and error; a fork runs `python ARGV` with them. The
responses are its process id and, when it has ended, its status (see `os.waitpid`). If the connection is closed before,
the fork is killed. tests/support/programs.py has the client.

A fork leaves `serve` and runs the program at the end of this file, so that the interpreter ends it as any other:
exceptions, exit codes, threads, `atexit`.
"""

import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from typing import Any


def serve(path: str, owner: int) -> dict[str, Any] | None:
    """Fork for each request. Return the request in a fork, and None when the owner has ended."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)  # whoever sees it can connect
        while os.path.exists(f"/proc/{owner}"):
            connections = {connection: pid for pid, connection in running.values()}
            ready, _, _ = select.select([listener, *running, *connections], [], [], 1)
            for waited in ready:
                if waited is listener:
                    connection, _ = listener.accept()
                    content, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                    if not content:  # the client was killed
                        connection.close()
                        continue
                    if not (pid := os.fork()):
                        for other in (connection, *connections):
                            other.close()
                        for descriptor in running:
                            os.close(descriptor)
                        _become(descriptors)
                        return json.loads(content)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    running[os.pidfd_open(pid)] = pid, connection
                    _send(connection, pid)
                elif waited in connections:
                    _kill(connections[waited])
            for descriptor in ready:
                if descriptor in running:
                    pid, connection = running.pop(descriptor)
                    _send(connection, os.waitpid(pid, 0)[1])
                    connection.close()
                    os.close(descriptor)
    for pid, _ in running.values():
        _kill(pid)
    return None


def _become(descriptors: list[int]) -> None:
    """Take over standard input, output and error, in a new session."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.send(str(number).encode())


def _kill(pid: int) -> None:
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _assert_single_thread() -> None:
    """Assert that a fork lacks no thread. OpenBLAS ends its own at a fork, and starts them when it needs them."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started threads"


def run(argv: list[str], cwd: str, env: dict[str, str], path: list[str]) -> None:
    """Run `python ARGV` as the main program of this process.

    Args:
      path: where modules are found, without the program's directory and PYTHONPATH.
    """
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.orig_argv = [sys.executable, *argv]
    unbuffered = argv[0] == "-u"
    argv = argv[unbuffered:]
    _open_streams(unbuffered or bool(env.get("PYTHONUNBUFFERED")))
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Python's own generator does it itself
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    found_first = {"-m": cwd, "-c": ""}.get(argv[0], os.path.dirname(os.path.abspath(argv[0])))
    also_found = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    sys.path[:] = [found_first, *map(os.path.abspath, also_found), *path]
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        runpy._run_module_as_main(argv[1])
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = argv
        main.__file__ = argv[0]
        with open(argv[0], "rb") as file:
            code = compile(file.read(), argv[0], "exec")
        exec(code, main.__dict__)


def _open_streams(unbuffered: bool) -> None:
    """Open standard input, output and error again: Python's own know what they were when it started."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        first = getattr(sys, name)
        write_through = bool(number) and unbuffered
        binary = open(number, "wb" if number else "rb", buffering=0 if write_through else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            binary, encoding=first.encoding, errors=first.errors, write_through=write_through,
            line_buffering=not write_through and (name == "stderr" or os.isatty(number)),
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    address, owner, *modules = sys.argv[1:]
    path = sys.path[:] = sys.path[1:]
    for module in modules:
        importlib.import_module(module)
    _assert_single_thread()
    gc.freeze()
    server = os.getpid()
    try:
        request = serve(address, int(owner))
    finally:
        if os.getpid() == server:
            for suffix in ("", ".lock", ".log"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address + suffix)
    if request is not None:
        run(**request, path=path)
