"""Connections between the processes of a run, both ends of which have the same token.

Each end sends a random nonce, and then an HMAC of both nonces with the token. So the token is never sent, and a
recorded handshake is useless later. Messages after it are neither signed nor encrypted: the network must be private.

A message is a line with a JSON object. An empty object is a heartbeat.

JAX's own connections to process 0 go through a local relay (`start_relay`).
"""

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from typing import Any

_NONCE = re.compile(rb"[0-9a-f]{64}")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_HANDSHAKE_BYTES = 1 << 12
_CHUNK = 1 << 16


class Unauthenticated(EOFError):
    """The other end has a different token."""


def proof(token: bytes, *, from_leader: bool, nonces: tuple[bytes, bytes]) -> bytes:
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
            self._expected = proof(self._token, from_leader=not self._leads, nonces=nonces)
            self._send_line(proof(self._token, from_leader=self._leads, nonces=nonces))
        elif hmac.compare_digest(line, self._expected):
            self.authenticated = True
        else:
            raise Unauthenticated


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
