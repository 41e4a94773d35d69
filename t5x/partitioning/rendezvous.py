"""Connect the processes of a run before JAX starts, which would abort if one is missing or was started for another run.

Process 0 listens at the coordinator's address. Each other process connects to it, identifies itself, and keeps the
connection open for `watch.py`. Process 0 stops listening once all have joined.

Only processes with the run's token are accepted: each end of a connection (`Channel`) sends a random nonce, then an
HMAC of both nonces with the token. So the token is never sent, and a recorded handshake is useless later. Messages
after it are neither signed nor encrypted: the network must be private. A message is a line with a JSON object. An
empty object is a heartbeat.

JAX's own connections to process 0 go through a local relay (`start_relay`).
"""

import contextlib
import dataclasses
import glob
import hmac
import json
import logging
import os
import re
import secrets
import selectors
import socket
import threading
import time
from typing import Any

import jax

from t5x._runtime.errors import UserError
from t5x.partitioning.cluster import TOKEN, ProcessAddress

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0  # after which an unauthenticated connection is dropped
_POLL_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_LATE_SECONDS = 3.0  # that process 0 may have started later than the others
_MAX_UNAUTHENTICATED = 256  # connections, beyond the number of processes
_NONCE = re.compile(rb"[0-9a-f]{64}")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_HANDSHAKE_BYTES = 1 << 12
_CHUNK = 1 << 16


class Unauthenticated(EOFError):
    """The other end has a different token."""


def _proof(token: bytes, *, from_leader: bool, nonces: tuple[bytes, bytes]) -> bytes:
    """Return what only an end that has the token can send: an HMAC of the nonces of process 0 and of the other."""
    return hmac.digest(token, b"t5x %d %s %s" % (from_leader, *nonces), "sha256").hex().encode()


class Channel:
    """One end of a connection that carries JSON objects once both ends have proven that they have the token.

    Args:
      sock: connected.
      token: the secret of the run.
      leads: whether this is the end of process 0.

    Attributes:
      authenticated: whether the other end has proven that it has the token.
      opened: when the connection was opened, by `time.monotonic`.
      silent: seconds since the last message, as counted by the owner.
    """

    def __init__(self, sock: socket.socket, token: bytes, *, leads: bool):
        self.socket = sock
        self.opened = time.monotonic()
        self.silent = 0.0
        self.authenticated = False
        self._token, self._leads = token, leads
        self._nonce = secrets.token_hex(32).encode()
        self._expected: bytes | None = None  # proof of the other end
        self._incomplete = b""
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send_line(self._nonce)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A broken connection is noticed only by `receive`."""
        self._send_line(json.dumps(message).encode())

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; block only if there are none.

        Raises:
          Unauthenticated: the other end does not have the token.
          EOFError: the other end is gone, or does not speak this protocol.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except OSError as error:
            raise EOFError from error
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if not data or len(self._incomplete) > (_MAX_MESSAGE_BYTES if self.authenticated else _MAX_HANDSHAKE_BYTES):
            raise EOFError
        while lines and not self.authenticated:
            self._authenticate(lines.pop(0))
        self.silent = 0.0
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise EOFError from error
        if not all(isinstance(message, dict) for message in messages):
            raise EOFError
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _send_line(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(line + b"\n")

    def _authenticate(self, line: bytes) -> None:
        """Answer the other end's nonce, or check its proof."""
        if self._expected is None:
            if not _NONCE.fullmatch(line):
                raise EOFError
            nonces = (self._nonce, line) if self._leads else (line, self._nonce)
            self._expected = _proof(self._token, from_leader=not self._leads, nonces=nonces)
            self._send_line(_proof(self._token, from_leader=self._leads, nonces=nonces))
        elif hmac.compare_digest(line, self._expected):
            self.authenticated = True
        else:
            raise Unauthenticated


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
    def here(cls, address: ProcessAddress) -> "Member":
        """Return this process."""
        host, boot = socket.gethostname(), ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return cls(address.index, address.count, host, os.getpid(), f"{host} {boot}".strip(), _visible_gpus())

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
    address: ProcessAddress, me: Member, timeout: float, jax_port: int, *, local_address: str, token: bytes
) -> tuple[list[Member], dict[int, Channel]]:
    """Wait for all other processes and start the run. Called by process 0.

    Connections that do not belong to this run are dropped, whatever they send, and do not delay the others.

    Args:
      address: of process 0, as the others reach it.
      me: process 0.
      timeout: seconds.
      jax_port: port of JAX's coordination service, which is sent to the others.
      local_address: to listen at; "" is all addresses of this machine.
      token: the secret of the run.

    Returns:
      All processes in order, and the connections to the others.

    Raises:
      UserError: a process is missing or does not fit the others. All that have connected raise it too.
    """
    joined: dict[Channel, Member | None] = {}  # None: it has not introduced itself yet
    members = {0: me}
    deadline = time.monotonic() + timeout
    with _listen(address, local_address) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(channel: Channel) -> None:
            selector.unregister(channel)
            channel.close()
            if (member := joined.pop(channel)) is not None:
                del members[member.index]

        try:
            while len(members) < me.count:
                now = time.monotonic()
                if now >= deadline:
                    missing = [str(n) for n in range(me.count) if n not in members]
                    raise UserError(
                        f"process 0 waited {timeout:.0f} s at {address.coordinator}; {len(missing)} of {me.count} "
                        f"processes did not connect: {', '.join(missing[:20])}. See their logs, check that they can "
                        f"reach {address.coordinator}, or wait longer with --initialization_timeout."
                    )
                unknown = [channel for channel, member in joined.items() if member is None]
                excess = len(unknown) - me.count - _MAX_UNAUTHENTICATED
                for number, channel in enumerate(unknown):
                    if number < excess or now - channel.opened > HANDSHAKE_SECONDS:
                        drop(channel)
                for key, _ in selector.select(min(deadline - now, _POLL_SECONDS)):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):  # it has closed already
                            channel = Channel(listener.accept()[0], token, leads=True)
                            joined[channel] = None
                            selector.register(channel, selectors.EVENT_READ, channel)
                        continue
                    channel = key.data
                    try:
                        for message in channel.receive():
                            member = _read_introduction(message, members)
                            members[member.index] = joined[channel] = member
                    except EOFError as error:  # not a process of this run, or one that gave up and may retry
                        if isinstance(error, Unauthenticated):
                            _warn_of_token(channel)
                        drop(channel)
        except UserError as error:
            for channel in joined:
                if channel.authenticated:
                    channel.send({"refused": str(error)})
            raise
    ordered = [members[n] for n in range(me.count)]
    channels = {member.index: channel for channel, member in joined.items() if member is not None}
    for channel in joined.keys() - channels.values():
        channel.close()
    for channel in channels.values():
        channel.send({"port": jax_port, "members": [dataclasses.asdict(member) for member in ordered]})
    return ordered, channels


def _listen(address: ProcessAddress, local_address: str) -> socket.socket:
    """Listen at the coordinator's port."""
    try:
        listener = bind(local_address, address.port, socket.SO_REUSEADDR)
        listener.listen(1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {address.port} (of --coordinator_address {address.coordinator}): "
            f"{error.strerror}. If another run uses it, choose another port for all processes."
        ) from error
    listener.setblocking(False)
    return listener


def bind(local_address: str, port: int, option: int) -> socket.socket:
    """Return a socket that is bound to a port.

    Args:
      local_address: of this machine; "" is all of its addresses, IPv6 included.
      port: 0 picks a free one.
      option: of the socket, to be set before it is bound.
    """
    everywhere = not local_address and socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if everywhere or ":" in local_address else socket.AF_INET)
    if everywhere:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind((local_address or ("::" if everywhere else ""), port))
    return sock


def _warn_of_token(channel: Channel) -> None:
    with contextlib.suppress(OSError):
        log.warning(
            "rejected a connection from %s, which has another token than process 0. If it is a process of this run, "
            "give all processes the same %s.", channel.socket.getpeername()[0], TOKEN,
        )  # fmt: skip


def _read_introduction(message: dict[str, Any], members: dict[int, Member]) -> Member:
    """Return the process that has connected.

    Raises:
      EOFError: the message does not describe a process.
      UserError: the process was started for another run.
    """
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


def join(
    address: ProcessAddress, me: Member, timeout: float, *, token: bytes
) -> tuple[list[Member], dict[int, Channel], int]:
    """Connect to process 0 and wait until all have joined. Called by all other processes.

    Returns:
      All processes in order, the connection to process 0, and the port of JAX's coordination service there.

    Raises:
      UserError: process 0 was not reached, or has refused to start the run.
    """
    deadline = time.monotonic() + timeout
    reason = "nothing answered"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((address.host, address.port), timeout=min(remaining, HANDSHAKE_SECONDS))
            channel = Channel(sock, token, leads=False)
            while not channel.authenticated:
                channel.receive()
            channel.send(dataclasses.asdict(me))
            # Process 0 may have started later, and only it knows who is missing: let it time out first.
            sock.settimeout(remaining + _LATE_SECONDS)
            while not (messages := channel.receive()):
                pass
            if "refused" in messages[0]:
                raise UserError(messages[0]["refused"])
            sock.settimeout(None)
            members = [Member(**member) for member in messages[0]["members"]]
            return members, {0: channel}, int(messages[0]["port"])
        except Unauthenticated:
            channel.close()
            raise UserError(
                f"The server at {address.coordinator} has another token than process {me.index}, whose {TOKEN} is "
                f"{'set' if token else 'not set'}. Start all processes with the same {TOKEN}."
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        except EOFError:
            channel.close()
            reason = "it answered, but not all processes connected"
            if time.monotonic() < deadline:
                reason = "the server there was not process 0 of this run, or ended"
        time.sleep(min(_RETRY_SECONDS, remaining))
    raise UserError(
        f"process {me.index} did not reach process 0 at {address.coordinator} within {timeout:.0f} s: {reason}. Check "
        "that process 0 runs there, that all processes have the same --coordinator_address, and that no firewall "
        "blocks the port, or wait longer with --initialization_timeout."
    )


# --- JAX's connections ------------------------------------------------------------------------------------------------


def start_relay(host: str, port: int) -> int:
    """Forward connections to a port of this machine, which is returned, to JAX's coordination service in process 0.

    JAX's client aborts the process with a dump as soon as its connection breaks. The relay hides this: calls stay
    unanswered, and `watch.py` can report in one line what happened.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, (host, port)), name="t5x-relay", daemon=True).start()
    return listener.getsockname()[1]


def _accept(listener: socket.socket, target: tuple[str, int]) -> None:
    held: list[socket.socket] = []  # unreferenced sockets would be closed
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(target, timeout=30)
        except OSError:
            near.close()  # JAX retries until its own timeout
            continue
        far.settimeout(None)
        held += [near, far]
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, args in (("out", (near, far, True)), ("back", (far, near, False))):
            threading.Thread(target=_pump, args=args, name=f"t5x-relay-{name}", daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, from_here: bool) -> None:
    """Copy until an end closes. Only a close by JAX in this process is forwarded."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
        if from_here:
            target.shutdown(socket.SHUT_RDWR)
