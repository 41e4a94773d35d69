"""Runs programs of the reference environment in forks of one process, which has imported TensorFlow and seqio.

Importing them takes seven seconds, and a dozen tests ask the reference:

    python reference_server.py SOCKET OWNER

Listens at the Unix socket until the process OWNER ends. A request is a JSON object {"argv", "cwd", "env"} with the
descriptors for standard output and standard error; the response is the exit code. If the connection is closed first,
the program is killed. tests/programs.py has the client.
"""

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback

import seqio  # noqa: F401
import tensorflow  # noqa: F401


def run(argv: list[str]) -> int:
    """Run `python ARGV`, in this process; return the exit code."""
    try:
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = argv
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(connection: socket.socket) -> int:
    """Fork a process for the request of a connection; return its id."""
    content, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    if pid := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        request = json.loads(content)
        for name in {*os.environ, *request["env"]}:
            if name.startswith("JAX_") and os.environ.get(name) != request["env"].get(name):
                raise ValueError(f"{name} was read when JAX was imported: start a process of its own")
        for name in os.environ.keys() - request["env"].keys():
            del os.environ[name]
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        path = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [directory for directory in path if directory and directory not in sys.path]
        code = run(request["argv"])
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def serve(path: str, owner: int) -> None:
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while os.path.exists(f"/proc/{owner}"):
            ready, _, _ = select.select([listener, *running.values()], [], [], 0.1)
            for pid, connection in running.items():
                if connection in ready:  # closed by the client
                    os.killpg(pid, signal.SIGKILL)
            if listener in ready:
                connection, _ = listener.accept()
                running[start(connection)] = connection
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with running.pop(ended[0]) as connection, contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        serve(sys.argv[1], int(sys.argv[2]))
    finally:
        for suffix in ("", ".lock", ".log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(sys.argv[1] + suffix)
