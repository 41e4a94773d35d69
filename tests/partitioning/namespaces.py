"""Machines on a network, each a network namespace with a host name of its own. Needs root and iproute2."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.programs import environment
from tests.support.xla_flags import QUICK_COMPILATION

HUB = "10.77.0.254"
_SETUP = 'hostname "machine$0" && mount --bind "$1" /etc/hosts && cd "$2" && shift 2 && exec "$@"'


# Everything that `Machines` needs, in namespaces that end with the shell.
_PROBE = (
    "mount --bind /etc/hosts /etc/hosts && hostname probe && ip link add bridge0 type bridge && "
    "ip link add port0 type veth peer name eth0 && ip netns add t5x-$$ && ip netns delete t5x-$$"
)


@functools.cache
def permitted() -> bool:
    """Return whether this machine lets us make namespaces and networks."""
    probe = ["unshare", "--net", "--mount", "--uts", "sh", "-c", _PROBE]
    return bool(shutil.which("ip")) and not subprocess.run(probe, capture_output=True).returncode


class Machines:
    """`machine0`, `machine1`, … with addresses 10.77.0.1, …, on a bridge that nothing else can reach.

    Args:
      count: number of machines.
      directory: each gets an empty working directory in it, `machine<N>`.
      own_address: what the name of a machine means on that machine; by default, its address on the network.
    """

    def __init__(self, count: int, directory: Path, own_address: str = ""):
        self.count, self._directory, self._own_address = count, directory, own_address
        self._prefix = f"t5x-{os.getpid()}-"

    def __enter__(self) -> "Machines":
        hub = self._prefix + "hub"
        try:
            _ip("netns", "add", hub)
            for words in ("add bridge0 type bridge", "set bridge0 up", "set lo up"):
                _ip("-n", hub, "link", *words.split())
            _ip("-n", hub, "address", "add", f"{HUB}/24", "dev", "bridge0")
            for n in range(self.count):
                (self._directory / f"machine{n}").mkdir()
                self._write_hosts(n)
                _ip("netns", "add", f"{self._prefix}{n}")
                _ip("-n", hub, *f"link add port{n} type veth peer name eth0 netns {self._prefix}{n}".split())
                _ip("-n", hub, *f"link set port{n} master bridge0 up".split())
                _ip("-n", f"{self._prefix}{n}", "address", "add", f"{self.address(n)}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    _ip("-n", f"{self._prefix}{n}", "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("hub", *range(self.count)):
            subprocess.run(["ip", "netns", "delete", f"{self._prefix}{name}"], capture_output=True)

    def _write_hosts(self, index: int) -> None:
        addresses = {n: self.address(n) for n in range(self.count)}
        if self._own_address:
            addresses[index] = self._own_address
        lines = ["127.0.0.1 localhost", *(f"{address} machine{n}" for n, address in addresses.items())]
        (self._directory / f"hosts{index}").write_text("".join(f"{line}\n" for line in lines))

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def connect(self, index: int, *, up: bool) -> None:
        """Plug a machine's cable in or out."""
        _ip("-n", self._prefix + "hub", "link", "set", f"port{index}", "up" if up else "down")

    def start(self, index: int, command: Sequence[Any], **options: Any) -> subprocess.Popen:
        """Start a program on a machine, in its working directory."""
        hosts, directory = self._directory / f"hosts{index}", self._directory / f"machine{index}"
        setup = ["unshare", "--uts", "sh", "-c", _SETUP, str(index), str(hosts), str(directory)]
        return self._inside(str(index), [*setup, *command], options)

    def start_at_hub(self, command: Sequence[Any], **options: Any) -> subprocess.Popen:
        """Start a program that the machines reach at the address HUB."""
        return self._inside("hub", command, options)

    def _inside(self, name: str, command: Sequence[Any], options: dict[str, Any]) -> subprocess.Popen:
        return subprocess.Popen(["ip", "netns", "exec", self._prefix + name, *map(str, command)], **options)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Process:
    """A Python program on a machine, with its own working and cache directories.

    Attributes:
      started: the process.
    """

    def __init__(self, machines: Machines, index: int, words: Sequence[object], log: Path, **variables: str):
        self.log = log
        env = environment(JAX_PLATFORMS="cpu", T5X_CACHE_DIR=str(log.parent / f"cache{index}"), **variables)
        with log.open("wb") as output:
            self.started = machines.start(index, [sys.executable, *words], stdout=output, stderr=output, env=env)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def error(self) -> str:
        """Return its error message, which must be one line."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.output and "stack trace" not in self.output, self.output
        return lines[0]


@contextlib.contextmanager
def running(
    machines: Machines, root: Path, words: Sequence[object], count: int, *, devices: int = 1, **variables: str
) -> Iterator[list[Process]]:
    """Run a program on the first machines until the end of the block.

    Args:
      root: for logs and caches.
      words: arguments of Python; `{index}` becomes the number of the machine.
      count: number of machines.
      devices: of each process.
    """
    flags = f"{QUICK_COMPILATION} --xla_force_host_platform_device_count={devices}"
    variables = {"XLA_FLAGS": flags, "T5X_CLUSTER_TOKEN": "of sixteen characters or more", **variables}
    processes: list[Process] = []
    try:
        for index in range(count):
            own = [str(word).replace("{index}", str(index)) for word in words]
            processes.append(Process(machines, index, own, root / f"log{index}", **variables))
        yield processes
    finally:
        for process in processes:
            process.started.kill()
            process.started.wait()


def finish(processes: list[Process], timeout: float) -> list[int]:
    """Wait for all and return their exit codes."""
    wait_for(lambda: all(process.started.poll() is not None for process in processes), processes, timeout)
    return [process.started.returncode for process in processes]


def wait_for(condition: Callable[[], bool], processes: list[Process], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "\n\n".join(process.output[-3000:] for process in processes)
        time.sleep(0.02)
