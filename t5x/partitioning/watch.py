"""The processes of a run find each other, and each notices when another one ends.

Process 0 listens at the coordinator's address. Each other process connects to it, identifies itself, and keeps the
connection open. If a process dies, its connection breaks at once; if it is stopped or loses its network, it falls
silent. Process 0 notifies all others; then every process reports in one line what happened, and exits. Only processes
with the run's token are accepted (see `link.py`); process 0 stops listening once all have joined.
"""

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from t5x.errors import UserError
from t5x.partitioning.cluster import TOKEN, Place
from t5x.partitioning.link import Link, Unauthenticated

log = logging.getLogger(__name__)

DIED = 75  # EX_TEMPFAIL: a scheduler may restart the run
HEARTBEAT = 2.0  # seconds
SILENCE = 30.0  # seconds without a message after which a process counts as lost
GRACE = 3.0  # seconds that a process has to report its own error before it exits for another one's
STOP = 60.0  # seconds within which all must stop once one has
CAUSE = 5.0  # seconds to wait for news that the death of another process caused an error
HANDSHAKE = 10.0  # seconds that a connection has to authenticate
_STRANGERS = 256  # unauthenticated connections, beyond the number of processes


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


# --- Joining ----------------------------------------------------------------------------------------------------------


def gather(
    place: Place, me: Member, timeout: float, port: int, *, address: str, token: bytes
) -> tuple[list[Member], dict[int, Link]]:
    """Wait for all other processes and start the run. Called by process 0.

    Connections that do not belong to this run are dropped, whatever they send, and do not delay the others.

    Args:
      place: the number of processes and the address.
      me: process 0.
      timeout: seconds.
      port: of JAX's coordination service, which is sent to the others.
      address: local address to listen at; "" is all of them.
      token: the secret of the run.

    Returns:
      All processes in order, and the connections to the others.
    """
    members: dict[int, Member] = {0: me}
    links: dict[int, Link] = {}
    strangers: dict[Link, float] = {}  # and when each connected
    deadline = time.monotonic() + timeout
    with _door(place, address) as door, selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)

        def drop(link: Link) -> None:
            selector.unregister(link)
            link.close()
            strangers.pop(link, None)
            for index in [n for n, other in links.items() if other is link]:
                del members[index], links[index]

        try:
            while len(members) < place.count:
                now = time.monotonic()
                if now >= deadline:
                    missing = [str(n) for n in range(place.count) if n not in members]
                    raise UserError(
                        f"process 0 waited {timeout:.0f} s at {place.address}, and {len(missing)} of {place.count} "
                        f"processes did not come: {', '.join(missing[:20])}. Look at their logs, and whether they "
                        f"reach {place.address}; --initialization_timeout is how long to wait."
                    )
                for link in [link for link, came in strangers.items() if now - came > HANDSHAKE]:
                    drop(link)
                for key, _ in selector.select(min(deadline - now, HEARTBEAT)):
                    link = key.fileobj
                    if link is door:
                        with contextlib.suppress(OSError):  # it has closed already
                            link = Link(door.accept()[0], token, leads=True)
                            selector.register(link, selectors.EVENT_READ)
                            strangers[link] = time.monotonic()
                        if len(strangers) > place.count + _STRANGERS:
                            drop(next(iter(strangers)))
                        continue
                    if link.fileno() < 0:  # it has just been dropped
                        continue
                    try:
                        for message in link.receive():
                            member = _introduced(message, members)
                            members[member.index], links[member.index] = member, link
                            strangers.pop(link, None)
                    except EOFError as error:  # not a process of ours, or one that gave up and may retry
                        if isinstance(error, Unauthenticated):
                            _reject(link)
                        drop(link)
        except UserError as error:
            for link in strangers | dict.fromkeys(links.values()):
                if link.ready:
                    link.send({"refused": str(error)})
            raise
    ordered = [members[n] for n in range(place.count)]
    for link in strangers:
        link.close()
    for link in links.values():
        link.send({"port": port, "members": [dataclasses.asdict(member) for member in ordered]})
    return ordered, links


@contextlib.contextmanager
def _door(place: Place, address: str) -> Iterator[socket.socket]:
    """Listen at the coordinator's port."""
    try:
        everywhere = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET
        door = socket.create_server((address, place.port), family=family, dualstack_ipv6=everywhere, backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {place.port} (of --coordinator_address {place.address}): "
            f"{error.strerror}. Another run may use it: choose another port for all processes."
        ) from error
    with door:
        door.setblocking(False)
        yield door


def _reject(link: Link) -> None:
    with contextlib.suppress(OSError):
        log.warning(
            "a connection from %s has another token than process 0 and was rejected. If it is a process of this run, "
            "give all processes the same %s", link.socket.getpeername()[0], TOKEN,
        )  # fmt: skip
    link.reject()


def _introduced(message: dict[str, Any], members: dict[int, Member]) -> Member:
    """Return who has joined. EOFError: not a process of ours; UserError: one that was started for another run."""
    types = {field.name: field.type for field in dataclasses.fields(Member)}
    if {name: type(value) for name, value in message.items()} != types:
        raise EOFError
    member = Member(**message)
    if member.count != members[0].count:
        raise UserError(
            f"{member} was started with --process_count={member.count}, but process 0 with {members[0].count}. Give "
            "all the same."
        )
    if not 0 <= member.index < member.count:
        raise EOFError
    if member.index in members:
        raise UserError(f"two processes have --process_index={member.index}: {members[member.index]} and {member}.")
    return member


def join(place: Place, me: Member, timeout: float, *, token: bytes) -> tuple[list[Member], Link, int]:
    """Connect to process 0 and wait until all have joined. Called by all other processes.

    Returns:
      All processes in order, the connection to process 0, and the port of JAX's coordination service there.
    """
    deadline = time.monotonic() + timeout
    why = "nothing answered"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = Link(
                socket.create_connection((place.host, place.port), timeout=min(left, HANDSHAKE)), token, leads=False
            )
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(0.5, max(left, 0)))
            continue
        try:
            while not link.ready:
                link.receive()
            link.send(dataclasses.asdict(me))
            why = "it answered, but not all processes came"
            while (left := deadline - time.monotonic()) > 0:
                # Process 0 may have started later, and only it knows who is missing: let it time out first.
                link.socket.settimeout(left + GRACE)
                for message in link.receive():
                    if "refused" in message:
                        raise UserError(message["refused"])
                    link.socket.settimeout(None)
                    return [Member(**m) for m in message["members"]], link, int(message["port"])
        except Unauthenticated:
            link.close()
            raise UserError(
                f"what answers at {place.address} has another token than process {place.index}, whose {TOKEN} is "
                f"{'set' if token else 'not set'}. Start all processes with the same {TOKEN}."
            ) from None
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
    """A thread that watches the other processes until this one ends.

    Attributes:
      me: this process's index.
      members: all processes, in order.
    """

    def __init__(self, me: int, members: list[Member], links: dict[int, Link]):
        super().__init__(name="t5x-watch", daemon=True)
        self.members = members
        self.me = me
        self._links = links
        self._lock = threading.RLock()
        self._done: set[int] = set()
        self._all_done = threading.Event()
        self._leaving = threading.Event()  # this process reports its own error before it exits
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
                # If this process itself was stopped or starved, the others have not been silent.
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
        """Report that this process has finished, and wait for the others. Exits if one of them dies first.

        Returns:
          Whether all have finished within `timeout`.
        """
        if self.me == 0:
            self._hear(0, {"done": True})
        else:
            self._links[0].send({"done": True})
        return self._all_done.wait(timeout)

    def failed(self, text: str, code: int) -> None:
        """Report to the others that this process ends with an error."""
        self._leaving.set()
        if self.me == 0:
            self._judge(0, text, code)
        else:
            self._links[0].send({"failed": text, "code": code})

    def linger(self) -> None:
        """Wait until the others have read their messages, which might be lost if this process exited at once."""
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
                    self._links[index].socket.shutdown(socket.SHUT_WR)  # acknowledge, so that it may exit
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
        """End the run because of one process: process 0 notifies all others, and each exits."""
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
            return  # this process exits by itself and reports why
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"\nerror: {text}\n".encode())
        if self.me == 0:
            self.linger()
        os._exit(code)

    def _forget(self) -> None:
        """Close the connections in a forked child, so that they end with this process."""
        for link in self._links.values():
            link.close()
