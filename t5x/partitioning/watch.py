"""The processes of a run meet, and each notices when another one ends.

Process 0 listens at the coordinator's address. Each other process connects to it, says who it is, and keeps the
connection: a process that dies breaks it at once, one that is stopped or has lost its network falls silent. Process 0
tells all others; then every process says in one line what happened, and ends. Messages are lines of JSON, an empty line
is a heartbeat.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from t5x.errors import UserError
from t5x.partitioning.cluster import Place

DIED = 75  # EX_TEMPFAIL: a scheduler may start the run again
HEARTBEAT = 2.0  # seconds
SILENCE = 30.0  # seconds without a word after which a process counts as lost
GRACE = 3.0  # seconds in which a process may say itself what ends it, before it is ended for another one's error
STOP = 60.0  # seconds in which all must have stopped once one has
CAUSE = 5.0  # seconds in which an error may turn out to be the death of another process
_LONGEST = 1 << 20


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the run."""

    index: int
    count: int
    host: str
    pid: int
    machine: str
    gpus: str

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


class Link:
    """One end of a connection, over which lines go."""

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.silent = 0.0
        self._rest = b""
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Sends a message, or a heartbeat. A broken connection is noticed by who reads from it."""
        data = b"\n" if message is None else json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(data)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; EOFError where the other side is gone or no process of ours."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise EOFError from error
        if not data or len(self._rest) > _LONGEST:
            raise EOFError
        self.silent = 0.0
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines if line]
        except ValueError as error:
            raise EOFError from error
        if not all(isinstance(message, dict) for message in messages):
            raise EOFError
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


# --- Meeting ----------------------------------------------------------------------------------------------------------


def gather(place: Place, me: Member, timeout: float, port: int) -> tuple[list[Member], dict[int, Link]]:
    """Process 0: waits for all others and tells them to begin.

    Args:
      place: where to listen, and for how many.
      me: process 0.
      timeout: seconds.
      port: of JAX's coordination service, which the others are told.

    Returns:
      All processes in order, and the connections to the others.
    """
    members: dict[int, Member] = {0: me}
    links: dict[int, Link] = {}
    strangers: list[Link] = []
    deadline = time.monotonic() + timeout
    with _door(place) as door, selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        try:
            while len(members) < place.count:
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [str(n) for n in range(place.count) if n not in members]
                    raise UserError(
                        f"process 0 waited {timeout:.0f} s at {place.address}, and {len(missing)} of {place.count} "
                        f"processes did not come: {', '.join(missing[:20])}. Look at their logs, and whether they "
                        f"reach {place.address}; --initialization_timeout is how long to wait."
                    )
                for key, _ in selector.select(min(left, HEARTBEAT)):
                    if key.fileobj is door:
                        strangers.append(Link(door.accept()[0]))
                        selector.register(strangers[-1], selectors.EVENT_READ)
                        continue
                    link = key.fileobj
                    try:
                        for message in link.receive():
                            member = _introduced(message, members)
                            members[member.index], links[member.index] = member, link
                    except EOFError:  # no process of ours, or one that gave up: it may come again
                        selector.unregister(link)
                        link.close()
                        for index in [n for n, other in links.items() if other is link]:
                            del members[index], links[index]
        except UserError as error:
            for link in strangers:
                link.send({"refused": str(error)})
            raise
    ordered = [members[n] for n in range(place.count)]
    for link in strangers:
        if link not in links.values():
            link.close()
    for link in links.values():
        link.send({"port": port, "members": [dataclasses.asdict(member) for member in ordered]})
    return ordered, links


@contextlib.contextmanager
def _door(place: Place) -> Iterator[socket.socket]:
    """Listens at the coordinator's port, on all addresses of this machine."""
    try:
        ipv6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        door = socket.create_server(("", place.port), family=family, dualstack_ipv6=ipv6, backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {place.port} (of --coordinator_address {place.address}): "
            f"{error.strerror}. Another run may use it: choose another port for all processes."
        ) from error
    with door:
        yield door


def _introduced(message: dict[str, Any], members: dict[int, Member]) -> Member:
    """Who has come; UserError where it does not belong to this run."""
    try:
        member = Member(**message)
    except TypeError as error:
        raise EOFError from error
    if member.count != members[0].count:
        raise UserError(
            f"{member} was started with --process_count={member.count}, but process 0 with {members[0].count}. Give "
            "all the same."
        )
    if member.index in members:
        raise UserError(f"two processes have --process_index={member.index}: {members[member.index]} and {member}.")
    return member


def join(place: Place, me: Member, timeout: float) -> tuple[list[Member], Link, int]:
    """Another process: goes to process 0, and waits until all have come.

    Returns:
      All processes in order, the connection to process 0, and the port of JAX's coordination service there.
    """
    deadline = time.monotonic() + timeout
    why = "nothing answered"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = Link(socket.create_connection((place.host, place.port), timeout=min(left, 10)))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(0.5, max(left, 0)))
            continue
        link.send(dataclasses.asdict(me))
        why = "it answered, but not all processes came"
        try:
            while (left := deadline - time.monotonic()) > 0:
                # Process 0 may have begun to wait later: it is the one who knows who is missing.
                link.socket.settimeout(left + GRACE)
                for message in link.receive():
                    if "refused" in message:
                        raise UserError(message["refused"])
                    link.socket.settimeout(None)
                    return [Member(**m) for m in message["members"]], link, int(message["port"])
        except EOFError:
            link.close()
            if left > 0:
                why = "what answered there was not process 0 of this run, or ended"
            time.sleep(min(0.5, max(left, 0)))
    raise UserError(
        f"process {place.index} did not reach process 0 at {place.address} within {timeout:.0f} s: {why}. Check that "
        "process 0 runs there, that all processes have the same --coordinator_address, and that no firewall closes "
        "the port; --initialization_timeout is how long to wait."
    )


# --- Watching ---------------------------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Watches the other processes until the end of this one.

    Attributes:
      me: this process's index.
      members: all processes, in order.
      links: process 0: to all others; another process: to process 0.
    """

    def __init__(self, me: int, members: list[Member], links: dict[int, Link]):
        super().__init__(name="t5x-watch", daemon=True)
        self.members = members
        self.me = me
        self._links = links
        self._lock = threading.RLock()
        self._done: set[int] = set()
        self._all_done = threading.Event()
        self._leaving = threading.Event()  # this process has something to say itself before it ends
        self._judged = False
        os.register_at_fork(after_in_child=self._forget)

    def run(self) -> None:
        last = beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for index, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, index)
            while selector.get_map() and not self._all_done.is_set():
                for key, _ in selector.select(HEARTBEAT / 2):
                    try:
                        for message in key.fileobj.receive():
                            self._hear(key.data, message)
                    except EOFError:
                        selector.unregister(key.fileobj)
                        self._lost(key.data, "died or lost its network")
                now = time.monotonic()
                # Where this process itself was stopped or starved, that is no silence of others.
                passed, last = min(now - last, HEARTBEAT), now
                if now - beat >= HEARTBEAT:
                    beat = now
                    for link in self._links.values():
                        link.send()
                for index, link in self._links.items():
                    link.silent += passed
                    if link.silent > SILENCE:
                        self._lost(index, f"has said nothing for {SILENCE:.0f} s: it hangs or lost its network")

    def done(self, timeout: float | None = None) -> bool:
        """This process has finished: waits until all have, and is ended if one of them dies first.

        Returns:
          Whether all have finished within that time.
        """
        if self.me == 0:
            self._hear(0, {"done": True})
        else:
            self._links[0].send({"done": True})
        return self._all_done.wait(timeout)

    def failed(self, text: str, code: int) -> None:
        """This process ends with an error of its own: the others are told."""
        self._leaving.set()
        if self.me == 0:
            self._judge(0, text, code)
        else:
            self._links[0].send({"failed": text, "code": code})

    def linger(self) -> None:
        """Waits until the others have read what they were told: what a process that is gone has sent may be lost."""
        deadline = time.monotonic() + GRACE + 2
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.socket.settimeout(max(deadline - time.monotonic(), 0.01))
                while link.socket.recv(1 << 16):
                    link.socket.settimeout(max(deadline - time.monotonic(), 0.01))

    def _hear(self, index: int, message: dict[str, Any]) -> None:
        with self._lock:
            if "done" in message:
                self._done.add(index)
                if len(self._done) == len(self.members):
                    for link in self._links.values():
                        link.send({"all_done": True})
                    self._all_done.set()
            elif "all_done" in message:
                self._all_done.set()
            elif "failed" in message:
                with contextlib.suppress(OSError):
                    self._links[index].socket.shutdown(socket.SHUT_WR)  # it has been heard and may end
                self._judge(index, message["failed"], message["code"])
            elif "verdict" in message:
                self._obey(message["verdict"], message["code"])

    def _lost(self, index: int, how: str) -> None:
        text = (
            f"{self.members[index]} {how}: the run ends here too. Its own log may say why. Start all processes again: "
            "the run goes on from its last checkpoint"
        )
        self._judge(index, text, DIED)

    def _judge(self, index: int, text: str, code: int) -> None:
        """The run is over because of one process: process 0 tells all others, and each ends."""
        with self._lock:
            if self._judged or self._all_done.is_set():
                return
            self._judged = True
        if self.me == 0:
            for other, link in self._links.items():
                if other != index:
                    link.send({"verdict": text, "code": code})
        if index != self.me:
            self._obey(text, code)

    def _obey(self, text: str, code: int) -> None:
        if self._leaving.wait(0 if code == DIED else GRACE):
            return  # this process ends by itself, and says why
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"\nerror: {text}\n".encode())
        if self.me == 0:
            self.linger()
        os._exit(code)

    def _forget(self) -> None:
        """A forked child must not hold connections that end with this process."""
        for link in self._links.values():
            link.close()
