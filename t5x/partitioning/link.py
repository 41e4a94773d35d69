"""Authenticated connections between the processes of a run.

Each end first sends a random nonce. Both ends derive the key of the connection from the two nonces and the token that
the processes share. Every message then has an HMAC of its direction, its number and its content. The token is never
sent, and a message cannot be forged, replayed, reordered or reflected. Messages are not encrypted.

A message is a line: the HMAC in hexadecimal, a space, and a JSON object. An empty object is a heartbeat.
"""

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
from typing import Any

_NONCE = re.compile(rb"[0-9a-f]{64}")
_LONGEST = 1 << 20  # bytes of a message
_LONGEST_OF_STRANGERS = 1 << 12


class Unauthenticated(EOFError):
    """The other end has a different token, or a message was altered."""


class Link:
    """One end of an authenticated connection.

    Args:
      sock: connected.
      token: the secret of the run.
      leads: whether this is the end of process 0.

    Attributes:
      ready: whether the other end's nonce has arrived, so that messages can be sent.
      silent: seconds since the last message, as counted by the owner.
    """

    def __init__(self, sock: socket.socket, token: bytes, *, leads: bool):
        self.socket = sock
        self.silent = 0.0
        self._token, self._leads = token, leads
        self._key: bytes | None = None
        self._sent = self._received = 0
        self._rest = b""
        self._lock = threading.Lock()
        self._nonce = secrets.token_hex(32).encode()
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send_line(self._nonce)

    @property
    def ready(self) -> bool:
        return self._key is not None

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Send a message, or a heartbeat. A broken connection is noticed only by `receive`."""
        text = json.dumps(message or {}).encode()
        with self._lock:
            self._send_line(self._mac(self._leads, self._sent, text) + b" " + text)
            self._sent += 1

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; block only if there are none.

        Raises:
          Unauthenticated: if a message was not signed with the token.
          EOFError: if the other end is gone, or does not speak this protocol.
        """
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise EOFError from error
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > (_LONGEST if self._received else _LONGEST_OF_STRANGERS):
            raise EOFError
        return [message for line in lines if (message := self._read(line)) is not None]

    def reject(self) -> None:
        """Tell the other end, which is not authenticated, that its token is wrong."""
        self._send_line(b"wrong token")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _send_line(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(line + b"\n")

    def _read(self, line: bytes) -> dict[str, Any] | None:
        if self._key is None:
            if not _NONCE.fullmatch(line):
                raise EOFError
            nonces = (self._nonce, line) if self._leads else (line, self._nonce)
            self._key = hmac.digest(self._token, b"t5x link " + b" ".join(nonces), "sha256")
            return None
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(not self._leads, self._received, text)):
            raise Unauthenticated
        self._received += 1
        self.silent = 0.0
        try:
            message = json.loads(text)
        except ValueError as error:
            raise EOFError from error
        if not isinstance(message, dict):
            raise EOFError
        return message

    def _mac(self, from_leader: bool, number: int, text: bytes) -> bytes:
        assert self._key is not None, "not ready"
        return hmac.digest(self._key, b"%d %d " % (from_leader, number) + text, "sha256").hex().encode()
