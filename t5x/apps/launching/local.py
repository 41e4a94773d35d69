"""Start processes on this machine. They divide its GPUs; with --cpu_devices, each has virtual CPU devices instead."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any

from t5x._runtime.errors import UserError, check_at_least
from t5x.apps.launching import job

_TOKEN = "T5X_CLUSTER_TOKEN"
_EXIT_SECONDS = 60.0  # that the other processes have to end by themselves and report their reasons
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # of Linux


def add_arguments(parser: Any) -> None:
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="number of processes (1)")
    parser.add_argument(
        "--cpu_devices", type=int, metavar="N", help="run on the CPU, with N virtual devices per process"
    )


def launch(args: Any, command: list[str]) -> int:
    """Run the processes until all have ended, and return the exit status."""
    check_at_least(1, "--", processes=args.processes, cpu_devices=args.cpu_devices)
    variables = job.environment(args)
    if args.cpu_devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.cpu_devices}"
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    commands = _commands(args.processes, command)
    settings = [f"{name}={value}" for name, value in variables.items()]
    lines = [job.join_words(["env", *settings, *words]) if settings else job.join_words(words) for words in commands]
    job.save(args, command, {"commands.sh": " &\n".join(lines) + "\nwait\n"})
    if args.dry_run:
        return 0
    token = os.environ.get(_TOKEN) or secrets.token_hex(16)
    return run_together(commands, {**os.environ, **variables, _TOKEN: token})


def _commands(count: int, command: list[str]) -> list[list[str]]:
    start = [sys.executable, "-m", "t5x", *command]
    if count == 1:
        return [start]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = [f"--coordinator_address=127.0.0.1:{port}", f"--process_count={count}"]
    return [[*start, *shared, f"--process_index={index}"] for index in range(count)]


class ProcessFailed(UserError):
    """A process ended with an error; `exit_code` is its exit status, or 75 if it was killed."""

    def __init__(self, index: int, status: int):
        if status > 0:
            super().__init__(f"Process {index} ended with exit status {status}. Its messages are above.")
        else:
            super().__init__(
                f"Process {index} was killed by {signal.Signals(-status).name}, so all were ended. The system kills "
                "processes when memory runs out (see `dmesg`). The same command resumes a training run."
            )
        self.exit_code = status if status > 0 else 75  # EX_TEMPFAIL


def run_together(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> int:
    """Run processes until all have ended, and print their output with their index.

    If one fails, the others have a minute to end by themselves. Signals are passed on to all.

    Returns:
      0, or after a signal the status of a process that did not succeed.
    """
    started: list[subprocess.Popen] = []
    stopping = False

    def send(signum: int) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(signum)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        send(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, pass_on)
    for words in commands:
        started.append(
            subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # else Ctrl-C would reach it twice
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        )  # fmt: skip
    printing = []
    for index, process in enumerate(started):
        prefix = f"[{index}] " if len(started) > 1 else ""
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            printing.append(threading.Thread(target=_print_lines, args=(source, target, prefix), daemon=True))
            printing[-1].start()

    failed: dict[int, int] = {}
    deadline = None
    while any(process.poll() is None for process in started):
        failed = {index: process.returncode for index, process in enumerate(started) if process.poll()}
        if failed and deadline is None:
            deadline = time.monotonic() + _EXIT_SECONDS
        if deadline is not None and time.monotonic() > deadline and not stopping:
            break
        time.sleep(0.1)
    else:
        failed = {index: process.returncode for index, process in enumerate(started) if process.returncode}
    send(signal.SIGKILL)
    for thread in printing:
        thread.join(5)  # a grandchild may keep the pipe open
    if not failed:
        return 0
    # The cause is a process that was killed, or one with an error of its own; 75 may be due to another's death.
    index, status = min(failed.items(), key=lambda item: (item[1] > 0, item[1] == 75))
    if stopping:
        return status if status > 0 else 128 - status
    raise ProcessFailed(index, status)


def _end_with_parent() -> None:
    """Let this process get SIGTERM if its parent is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _print_lines(source: IO[bytes], target: IO[str], prefix: str) -> None:
    for line in source:
        target.write(prefix + line.decode(errors="replace").rstrip("\n") + "\n")
        target.flush()
