"""Each process of a run notices when another one ends.

All connections lead to process 0. If a process dies, its connection breaks at once; if it is stopped or loses its
network, it falls silent. Process 0 notifies all others; then every process reports in one line what happened, and
exits.

JAX's own heartbeat (`heartbeat_timeout_seconds`; 0.10 to 0.12) does not replace this. It ends the others in time, but
with SIGABRT and a stack trace, even if one process ends with a user's error, and whoever reaches its port may join.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any

from t5x.partitioning.link import Link
from t5x.partitioning.rendezvous import Member

DIED = 75  # EX_TEMPFAIL: a scheduler may restart the run
HEARTBEAT = 2.0  # seconds
SILENCE = 30.0  # seconds without a message after which a process counts as lost
GRACE = 3.0  # seconds that a process has to report its own error before it exits for another one's
STOP = 60.0  # seconds within which all must stop once one has
CAUSE = 5.0  # seconds to wait for news that the death of another process caused an error
_NAMED = 8  # processes that a message lists


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
        self._ending = False
        os.register_at_fork(after_in_child=self._close_links)

    def run(self) -> None:
        last = beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for index, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, index)
            while selector.get_map() and not self._all_done.is_set():
                for key, _ in selector.select(HEARTBEAT / 2):
                    try:
                        for message in self._links[key.data].receive():
                            self._receive(key.data, message)
                    except EOFError:
                        selector.unregister(key.fileobj)
                        self._lose(key.data, f"{self.members[key.data]} died or lost its network")
                now = time.monotonic()
                # If this process itself was stopped or starved, the others have not been silent.
                passed, last = min(now - last, HEARTBEAT), now
                if now - beat >= HEARTBEAT:
                    beat = now
                    for link in self._links.values():
                        link.send()
                for link in self._links.values():
                    link.silent += passed
                # Processes that are lost at the same moment fall silent up to a heartbeat apart.
                if any(link.silent > SILENCE + HEARTBEAT for link in self._links.values()):
                    self._lose_silent([index for index, link in self._links.items() if link.silent > SILENCE])

    def wait_for_all(self, timeout: float | None = None) -> bool:
        """Report that this process has finished, and wait for the others. Exits if one of them dies first.

        Returns:
          Whether all have finished within `timeout`.
        """
        self._send_to_leader({"done": True})
        return self._all_done.wait(timeout)

    def report_failure(self, reason: str, code: int) -> None:
        """Report to the others that this process ends with an error."""
        self._leaving.set()
        text = f"{self.members[self.me]} ended, and the run with it: {reason}"
        self._send_to_leader({"failed": text, "code": code})

    def _send_to_leader(self, message: dict[str, Any]) -> None:
        if self.me == 0:
            self._receive(0, message)
        else:
            self._links[0].send(message)

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

    def _receive(self, index: int, message: dict[str, Any]) -> None:
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
                if index in self._links:
                    with contextlib.suppress(OSError):
                        self._links[index].socket.shutdown(socket.SHUT_WR)  # acknowledge, so that it may exit
                self._end_run(index, message["failed"], message["code"])
            elif "verdict" in message:
                self._exit(message["verdict"], message["code"])

    def _lose_silent(self, silent: list[int]) -> None:
        names = ", ".join(str(self.members[index]) for index in silent[:_NAMED])
        more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
        all_others = len(silent) == len(self._links) > 1
        cause = f"process {self.me} has lost its network" if all_others else "hung, or without its network"
        self._lose(silent[0], f"process {self.me} received nothing for {SILENCE:.0f} s from {names}{more}: {cause}")

    def _lose(self, index: int, what: str) -> None:
        text = f"{what}. The run ends: see the log there. Restart all processes to resume from the last checkpoint"
        self._end_run(index, text, DIED)

    def _end_run(self, index: int, text: str, code: int) -> None:
        """End the run because of one process: process 0 notifies all others, and each exits."""
        with self._lock:
            if self._ending or self._all_done.is_set():
                return
            self._ending = True
        if self.me == 0:
            for other, link in self._links.items():
                if other != index:
                    link.send({"verdict": text, "code": code})
        if index != self.me:
            self._exit(text, code)

    def _exit(self, text: str, code: int) -> None:
        if self._leaving.wait(0 if code == DIED else GRACE):
            return  # this process exits by itself and reports why
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"\nerror: {text}\n".encode())
        if self.me == 0:
            self.linger()
        os._exit(code)

    def _close_links(self) -> None:
        """Close the connections in a forked child, so that they end with this process."""
        for link in self._links.values():
            link.close()
