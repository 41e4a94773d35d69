"""A local relay through which JAX reaches its coordination service in process 0.

JAX's client aborts the process with a dump as soon as its connection breaks. The relay hides this: calls stay
unanswered, and `watch.py` can report in one line what happened.
"""

import contextlib
import socket
import threading

_CHUNK = 1 << 16


class Relay:
    """A relay that forwards connections to `port` of this machine to another address."""

    def __init__(self, host: str, port: int):
        self._target = (host, port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._held: list[socket.socket] = []  # unreferenced sockets would be closed
        threading.Thread(target=self._accept, name="t5x-relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._door.accept()
            try:
                far = socket.create_connection(self._target, timeout=30)
            except OSError:
                near.close()  # JAX retries until its own timeout
                continue
            far.settimeout(None)
            self._held += [near, far]
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
