"""The processes of a run find each other.

Process 0 listens at the coordinator's address. Each other process connects to it, identifies itself, and keeps the
connection open for `watch.py`. Only processes with the run's token are accepted (see `link.py`); process 0 stops
listening once all have joined.
"""

import contextlib
import dataclasses
import glob
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax

from t5x.errors import UserError
from t5x.partitioning.cluster import TOKEN, Place
from t5x.partitioning.link import Link, Unauthenticated

log = logging.getLogger(__name__)

HANDSHAKE = 10.0  # seconds that a connection has to authenticate
_POLL = 2.0  # seconds
_RETRY = 0.5  # seconds
_LATE = 3.0  # seconds that process 0 may have started later than the others
_MAX_STRANGERS = 256  # unauthenticated connections, beyond the number of processes


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the run.

    Attributes:
      machine: a name of its machine that is unique in the run.
      gpus: the GPUs that it may use according to its environment, separated by commas.
    """

    index: int
    count: int
    host: str
    pid: int
    machine: str
    gpus: str

    @classmethod
    def here(cls, place: Place) -> "Member":
        """Return this process."""
        host, boot = socket.gethostname(), ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return cls(place.index, place.count, host, os.getpid(), f"{host} {boot}".strip(), _visible_gpus())

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


def _visible_gpus() -> str:
    platforms = jax.config.values["jax_platforms"]
    if platforms and not {"cuda", "gpu", "rocm"}.intersection(platforms.split(",")):
        return ""
    every_gpu = ",".join(str(n) for n in range(len(glob.glob("/dev/nvidia[0-9]*"))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", every_gpu)
    # In a cgroup of SLURM, each task counts its own GPUs from 0; these are their numbers on the machine.
    physical = os.environ.get("SLURM_STEP_GPUS", "")
    return physical if physical and physical.count(",") == visible.count(",") else visible


def own_gpus(me: Member, members: list[Member]) -> list[int] | None:
    """Return the positions of the visible GPUs that this process uses; None for all of them.

    Processes on one machine that see the same GPUs share them out. A process that was given its own GPUs, or is alone
    on its machine, uses all that it sees.
    """
    same = [member for member in members if (member.machine, member.gpus) == (me.machine, me.gpus)]
    count = len([gpu for gpu in me.gpus.split(",") if gpu])
    if len(same) == 1 or not count or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if count % len(same):
        raise UserError(
            f"{len(same)} processes on {me.host} see the same {count} GPUs and cannot divide them evenly. Start a "
            "number of processes that divides them, or give each its own with CUDA_VISIBLE_DEVICES."
        )
    share = count // len(same)
    first = same.index(me) * share
    return list(range(first, first + share))


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
    with _listen(place, address) as door, selectors.DefaultSelector() as selector:
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
                        f"process 0 waited {timeout:.0f} s at {place.address}; {len(missing)} of {place.count} "
                        f"processes did not connect: {', '.join(missing[:20])}. See their logs, check that they can "
                        f"reach {place.address}, or wait longer with --initialization_timeout."
                    )
                for link in [link for link, came in strangers.items() if now - came > HANDSHAKE]:
                    drop(link)
                for key, _ in selector.select(min(deadline - now, _POLL)):
                    if key.fileobj is door:
                        with contextlib.suppress(OSError):  # it has closed already
                            link = Link(door.accept()[0], token, leads=True)
                            selector.register(link, selectors.EVENT_READ, link)
                            strangers[link] = time.monotonic()
                        if len(strangers) > place.count + _MAX_STRANGERS:
                            drop(next(iter(strangers)))
                        continue
                    link = key.data
                    if link.fileno() < 0:  # it has just been dropped
                        continue
                    try:
                        for message in link.receive():
                            member = _read_introduction(message, members)
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
def _listen(place: Place, address: str) -> Iterator[socket.socket]:
    """Listen at the coordinator's port."""
    try:
        everywhere = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET
        door = socket.create_server((address, place.port), family=family, dualstack_ipv6=everywhere, backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {place.port} (of --coordinator_address {place.address}): "
            f"{error.strerror}. If another run uses it, choose another port for all processes."
        ) from error
    with door:
        door.setblocking(False)
        yield door


def _reject(link: Link) -> None:
    with contextlib.suppress(OSError):
        log.warning(
            "rejected a connection from %s, which has another token than process 0. If it is a process of this run, "
            "give all processes the same %s.", link.socket.getpeername()[0], TOKEN,
        )  # fmt: skip
    link.reject()


def _read_introduction(message: dict[str, Any], members: dict[int, Member]) -> Member:
    """Return who has joined. EOFError: not a process of ours; UserError: one that was started for another run."""
    types = {field.name: field.type for field in dataclasses.fields(Member)}
    if {name: type(value) for name, value in message.items()} != types:
        raise EOFError
    member = Member(**message)
    if member.count != members[0].count:
        raise UserError(
            f"{member} was started with --process_count={member.count}, but process 0 with {members[0].count}. Use the "
            "same number for all."
        )
    if not 0 <= member.index < member.count:
        raise EOFError
    if member.index in members:
        raise UserError(
            f"two processes have --process_index={member.index}: {members[member.index]} and {member}. Number them."
        )
    return member


def join(place: Place, me: Member, timeout: float, *, token: bytes) -> tuple[list[Member], Link, int]:
    """Connect to process 0 and wait until all have joined. Called by all other processes.

    Returns:
      All processes in order, the connection to process 0, and the port of JAX's coordination service there.
    """
    deadline = time.monotonic() + timeout
    reason = "nothing answered"
    while (left := deadline - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((place.host, place.port), timeout=min(left, HANDSHAKE))
            link = Link(sock, token, leads=False)
            while not link.ready:
                link.receive()
            link.send(dataclasses.asdict(me))
            # Process 0 may have started later, and only it knows who is missing: let it time out first.
            sock.settimeout(left + _LATE)
            while not (messages := link.receive()):
                pass
            if "refused" in messages[0]:
                raise UserError(messages[0]["refused"])
            sock.settimeout(None)
            return [Member(**member) for member in messages[0]["members"]], link, int(messages[0]["port"])
        except Unauthenticated:
            link.close()
            raise UserError(
                f"The server at {place.address} has another token than process {place.index}, whose {TOKEN} is "
                f"{'set' if token else 'not set'}. Start all processes with the same {TOKEN}."
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        except EOFError:
            link.close()
            reason = "it answered, but not all processes connected"
            if time.monotonic() < deadline:
                reason = "the server there was not process 0 of this run, or ended"
        time.sleep(min(_RETRY, left))
    raise UserError(
        f"process {place.index} did not reach process 0 at {place.address} within {timeout:.0f} s: {reason}. Check "
        "that process 0 runs there, that all processes have the same --coordinator_address, and that no firewall "
        "blocks the port, or wait longer with --initialization_timeout."
    )
