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
from typing import IO, Any

from t5x.errors import TemporaryError, UserError
from t5x.launching import job

_TOKEN = "T5X_CLUSTER_TOKEN"
_PATIENCE = 60.0  # seconds that the other processes have to end by themselves, with their reasons
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: Any) -> None:
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="number of processes (1)")
    parser.add_argument(
        "--cpu_devices", type=int, metavar="N", help="run on the CPU, with N virtual devices per process"
    )


def launch(args: Any, command: list[str]) -> int:
    """Run the processes until all have ended, and return the exit status."""
    for name in ("processes", "cpu_devices"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1.")
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
    return _Processes(commands, {**os.environ, **variables, _TOKEN: token}).wait()


def _commands(count: int, command: list[str]) -> list[list[str]]:
    start = [sys.executable, "-m", "t5x", *command]
    if count == 1:
        return [start]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = [f"--coordinator_address=127.0.0.1:{port}", f"--process_count={count}"]
    return [[*start, *place, f"--process_index={index}"] for index in range(count)]


class _Processes:
    """Running processes whose output is printed with their index, and which end together."""

    def __init__(self, commands: list[list[str]], environment: dict[str, str]):
        self._started: list[subprocess.Popen] = []
        self._printing: list[threading.Thread] = []
        self._asked_to_stop = False
        libc = ctypes.CDLL(None)  # loaded before the fork
        for signum in _PASSED_ON:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                signal.signal(signum, self._pass_on)
        for index, words in enumerate(commands):
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # else Ctrl-C would reach it twice
                preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: end if this process is killed
            )  # fmt: skip
            self._started.append(process)
            prefix = f"[{index}] " if len(commands) > 1 else ""
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                thread = threading.Thread(target=_print_lines, args=(source, target, prefix), daemon=True)
                thread.start()
                self._printing.append(thread)

    def wait(self) -> int:
        """Return 0 once all have succeeded, or the status of the first that failed."""
        first, deadline = None, None
        while any(process.poll() is None for process in self._started):
            failed = [index for index, process in enumerate(self._started) if process.poll()]
            if failed and first is None:
                first, deadline = failed[0], time.monotonic() + _PATIENCE
            if deadline is not None and time.monotonic() > deadline and not self._asked_to_stop:
                self._send(signal.SIGKILL)
            time.sleep(0.1)
        for thread in self._printing:
            thread.join(5)  # a grandchild may keep the pipe open
        failed = [index for index, process in enumerate(self._started) if process.returncode]
        if not failed:
            return 0
        first = failed[0] if first is None else first
        status = self._started[first].returncode
        if len(self._started) == 1 or self._asked_to_stop:
            return status if status > 0 else 128 - status
        if status > 0:
            print(f"error: process {first} ended with exit status {status}.", file=sys.stderr, flush=True)
            return status
        raise TemporaryError(
            f"Process {first} was killed by {signal.Signals(-status).name}, so all were ended. The system kills a "
            "process when memory runs out (`dmesg`). The same command resumes a training run."
        )

    def _pass_on(self, signum: int, frame: Any) -> None:
        self._asked_to_stop = True
        self._send(signum)

    def _send(self, signum: int) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signum)


def _print_lines(source: IO[bytes], target: IO[str], prefix: str) -> None:
    for line in source:
        target.write(prefix + line.decode(errors="replace").rstrip("\n") + "\n")
        target.flush()
