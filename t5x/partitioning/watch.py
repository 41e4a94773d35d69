"""Each process of a run notices when another one ends.

All connections lead to process 0. If a process dies, its connection breaks at once; if it is stopped or loses its
network, it falls silent. Process 0 notifies all others; then every process reports in one line what happened, and
exits.

JAX's own heartbeat (`heartbeat_timeout_seconds`; 0.10 to 0.12) does not replace this. It ends the others in time, but
with SIGABRT and a stack trace, even if one process ends with a user's error.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from typing import Any

from t5x._runtime.errors import TemporaryError
from t5x._runtime.signals import print_now
from t5x.partitioning.rendezvous import Channel, Member

DIED = TemporaryError.exit_code

# Which duration decides what. Before the start, `--initialization_timeout` does; of values that processes exchange,
# `distributed.PEER_LAG_SECONDS`.
HEARTBEAT_SECONDS = 2.0
PEER_SILENCE_SECONDS = 30.0  # without a heartbeat, after which a process counts as lost
PEER_NEWS_SECONDS = 5.0  # that a process with an error waits for the news that another one's death caused it
OWN_ERROR_SECONDS = 3.0  # that a process has to report its own error before it exits for another one's
DRAIN_SECONDS = 60.0  # within which all must stop once one has stopped in an orderly way
_LINGER_SECONDS = OWN_ERROR_SECONDS + 2  # that a process with a message to others waits for them to read it
_MAX_NAMES = 8  # processes that a message lists


class PeerWatcher(threading.Thread):
    """A thread that watches the other processes until this one ends.

    Attributes:
      me: this process's index.
      members: all processes, in order.
    """

    def __init__(self, me: int, members: list[Member], channels: dict[int, Channel]):
        super().__init__(name="t5x-watch", daemon=True)
        self.members = members
        self.me = me
        self._channels = channels
        self._lock = threading.RLock()
        self._done: set[int] = set()
        self._all_done = threading.Event()
        self._reporting = threading.Event()  # this process reports its own error before it exits
        self._is_ending = False
        os.register_at_fork(after_in_child=self._close_channels)

    def run(self) -> None:
        last = last_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for index, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, index)
            while selector.get_map() and not self._all_done.is_set():
                for key, _ in selector.select(HEARTBEAT_SECONDS / 2):
                    try:
                        for message in self._channels[key.data].receive():
                            self._receive_message(key.data, message)
                    except EOFError:
                        selector.unregister(key.fileobj)
                        self._lose(key.data, f"{self.members[key.data]} died or lost its network")
                now = time.monotonic()
                # If this process itself was stopped or starved, the others have not been silent.
                passed, last = min(now - last, HEARTBEAT_SECONDS), now
                if now - last_beat >= HEARTBEAT_SECONDS:
                    last_beat = now
                    self._send_to_all({})
                for channel in self._channels.values():
                    channel.silent += passed
                # Processes that are lost at the same moment fall silent up to a heartbeat apart.
                if any(c.silent > PEER_SILENCE_SECONDS + HEARTBEAT_SECONDS for c in self._channels.values()):
                    self._lose_silent([n for n, c in self._channels.items() if c.silent > PEER_SILENCE_SECONDS])

    def wait_for_all(self, timeout: float | None = None) -> bool:
        """Report that this process has finished, and wait for the others. Exits if one of them dies first.

        Returns:
          Whether all have finished within `timeout`.
        """
        self._send_to_leader({"done": True})
        return self._all_done.wait(timeout)

    def report(self, reason: str, code: int) -> None:
        """Report to the others that this process ends with an error."""
        self._reporting.set()
        text = f"{self.members[self.me]} ended, and the run with it: {reason}"
        self._send_to_leader({"error": text, "code": code})

    def linger(self) -> None:
        """Wait until the others have read their messages, which might be lost if this process exited at once."""
        deadline = time.monotonic() + _LINGER_SECONDS
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_WR)
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.socket.settimeout(max(deadline - time.monotonic(), 0.01))
                while channel.socket.recv(1 << 16):
                    channel.socket.settimeout(max(deadline - time.monotonic(), 0.01))

    def _send_to_leader(self, message: dict[str, Any]) -> None:
        if self.me == 0:
            self._receive_message(0, message)
        else:
            self._channels[0].send(message)

    def _send_to_all(self, message: dict[str, Any], but: int | None = None) -> None:
        for index, channel in self._channels.items():
            if index != but:
                channel.send(message)

    # Not `_handle`: a thread of Python 3.13 has an attribute of that name.
    def _receive_message(self, index: int, message: dict[str, Any]) -> None:
        """Handle a message of a process; in process 0 also its own."""
        with self._lock:
            if "done" in message:
                self._done.add(index)
                if len(self._done) == len(self.members):
                    self._send_to_all({"all_done": True})
                    self._all_done.set()
            elif "all_done" in message:
                self._all_done.set()
            elif "error" in message:
                if index != self.me:
                    with contextlib.suppress(OSError):
                        self._channels[index].socket.shutdown(socket.SHUT_WR)  # acknowledge, so that it may exit
                self._end(index, message["error"], message["code"])

    def _lose_silent(self, silent: list[int]) -> None:
        names = ", ".join(str(self.members[index]) for index in silent[:_MAX_NAMES])
        more = f" and {len(silent) - _MAX_NAMES} more" if len(silent) > _MAX_NAMES else ""
        all_others = len(silent) == len(self._channels) > 1
        cause = f"process {self.me} has lost its network" if all_others else "hung, or without its network"
        text = f"process {self.me} received nothing for {PEER_SILENCE_SECONDS:.0f} s from {names}{more}: {cause}"
        self._lose(silent[0], text)

    def _lose(self, index: int, what: str) -> None:
        text = f"{what}. The run ends: see the log there. Restart all processes to resume from the last checkpoint"
        self._end(index, text, DIED)

    def _end(self, index: int, text: str, code: int) -> None:
        """End the run because of one process: process 0 notifies all others, and each exits."""
        with self._lock:
            if self._is_ending or self._all_done.is_set():
                return
            self._is_ending = True
        if self.me == 0:
            self._send_to_all({"error": text, "code": code}, but=index)
        if index == self.me or self._reporting.wait(0 if code == DIED else OWN_ERROR_SECONDS):
            return  # this process exits by itself and reports why
        print_now(f"error: {text}")
        if self.me == 0:
            self.linger()
        os._exit(code)

    def _close_channels(self) -> None:
        """Close the connections in a forked child, so that they end with this process."""
        for channel in self._channels.values():
            channel.close()
