"""A local relay through which JAX reaches its coordination service in process 0.

JAX's client aborts the process with a dump as soon as its connection breaks. The relay hides this: calls stay
unanswered, and `watch.py` can report in one line what happened.
"""

import contextlib
import socket
import threading

_CHUNK = 1 << 16


def start_relay(host: str, port: int) -> int:
    """Forward connections to a port of this machine, which is returned, to another address."""
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
