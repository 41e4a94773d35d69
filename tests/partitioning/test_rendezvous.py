"""Who comes to the address of process 0: processes of the run, strangers, and processes of other runs.

Both ends of a connection prove that they have the token, and a recorded proof is useless later.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from t5x._runtime.errors import UserError
from t5x.partitioning import cluster, multiprocess, rendezvous
from t5x.partitioning.cluster import ProcessAddress
from t5x.partitioning.rendezvous import Channel, Member, Unauthenticated
from tests.partitioning.test_distributed import begin, finish
from tests.support.programs import free_port

TOKEN = b"0123456789abcdef"


def member(index: int, count: int = 2) -> Member:
    return Member(index, count, "host", 1, "machine", "")


class Gathering(threading.Thread):
    """Process 0 of a run, which waits for the others."""

    def __init__(self, timeout: float = 60, count: int = 2, delay: float = 0):
        super().__init__(daemon=True)
        self.delay = delay
        self.address = ProcessAddress("127.0.0.1", free_port(), count, 0)
        self.timeout = timeout
        self.result = self.error = None
        self.start()

    def run(self) -> None:
        time.sleep(self.delay)
        try:
            me = member(0, self.address.count)
            self.result = rendezvous.gather(self.address, me, self.timeout, 5, local_address="127.0.0.1", token=TOKEN)
        except UserError as error:
            self.error = error

    def connect(self) -> socket.socket:
        return connect(self.address.port)

    def join(self, index: int = 1, count: int = 2, token: bytes = TOKEN) -> list[Member]:
        members, channels, port = rendezvous.join(self.address, member(index, count), 30, token=token)
        assert port == 5
        channels[0].close()
        return members

    def finish(self) -> list[Member]:
        super().join(30)
        assert self.error is None and self.result is not None
        return self.result[0]


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    waiting = Gathering()
    yield waiting
    for channel in (waiting.result or ((), {}))[1].values():
        channel.close()


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A connection, as soon as somebody listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, port), timeout=30)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def authenticate(sock: socket.socket) -> Channel:
    """Return a connection whose other end, process 0, is known to have the token."""
    channel = Channel(sock, TOKEN, leads=False)
    while not channel.authenticated:
        assert channel.receive() == []
    return channel


def is_closed(stranger: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1 << 16):
            pass
    return True


def test_a_connection_with_another_token_is_refused(gathering):
    with pytest.raises(UserError, match=cluster.TOKEN):
        gathering.join(token=b"another token, not ours")
    with pytest.raises(UserError, match=f"{cluster.TOKEN} is not set"):
        gathering.join(token=b"")
    assert gathering.join() == gathering.finish() == [member(0), member(1)]


@pytest.mark.parametrize(
    "introduction",
    [{"index": 7}, {"index": 2}, {"index": -1}, {"index": "1"}, {"index": True}, {"count": None}, {"more": 1}],
    ids=str,
)
def test_an_invalid_introduction_is_dropped(gathering, introduction):
    channel = authenticate(gathering.connect())
    channel.send(vars(member(1)) | introduction)
    assert is_closed(channel.socket)
    assert gathering.join() == gathering.finish()


def test_replayed_handshake_of_an_earlier_run_does_not_join(gathering):
    """The attacker does not have the token, but has recorded how the same process joined before."""
    leader, joining = (Channel(end, TOKEN, leads=n == 0) for n, end in enumerate(socket.socketpair()))
    joining.receive()
    joining.send(vars(member(1)))
    recorded = leader.socket.recv(1 << 16)
    assert recorded.count(b"\n") == 3  # nonce, proof and introduction
    stranger = gathering.connect()
    stranger.sendall(recorded)
    assert is_closed(stranger)
    assert gathering.join() == gathering.finish() == [member(0), member(1)]


def test_a_silent_connection_is_dropped(gathering, monkeypatch):
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", 0.1)
    assert is_closed(gathering.connect())
    assert gathering.join() == gathering.finish()


def test_unauthenticated_connections_are_limited(gathering, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MAX_UNAUTHENTICATED", 3)
    strangers = [gathering.connect() for _ in range(20)]
    assert all(is_closed(stranger) for stranger in strangers[:10])
    assert gathering.join() == gathering.finish()


def test_unauthenticated_connections_within_the_limit_are_kept(gathering, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MAX_UNAUTHENTICATED", 3)
    strangers = [gathering.connect() for _ in range(5)]  # besides the limit, as many as there are processes
    assert all(len(stranger.recv(100)) == 65 for stranger in strangers)  # process 0 has accepted it
    strangers[0].settimeout(0.5)
    with pytest.raises(TimeoutError):
        strangers[0].recv(1)
    gathering.join()


def test_process_that_died_before_all_had_joined_may_start_again():
    waiting = Gathering(count=3)
    for _ in range(2):
        channel = authenticate(waiting.connect())
        channel.send(vars(member(1, 3)))
        channel.close()
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(lambda index: waiting.join(index, 3), (1, 2)))
    assert joined == [waiting.finish()] * 2 == [[member(n, 3) for n in range(3)]] * 2
    for channel in waiting.result[1].values():
        channel.close()


def test_the_port_is_closed_when_all_have_joined(gathering):
    gathering.join()
    gathering.finish()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gathering.address.port))


@pytest.mark.parametrize(("index", "count", "words"), [(0, 2, "process_index=0"), (1, 3, "process_count=3")])
def test_another_number_or_the_same_index_is_refused(gathering, index, count, words):
    with pytest.raises(UserError, match=words):
        gathering.join(index, count)
    threading.Thread.join(gathering, 30)
    assert words in str(gathering.error)


def test_a_missing_process_is_named_in_all_that_have_come():
    waiting = Gathering(timeout=2, count=3)
    with pytest.raises(UserError, match=r"1 of 3 processes did not connect: 1[.]"):
        waiting.join(2, 3)
    threading.Thread.join(waiting, 30)
    assert "1 of 3 processes did not connect: 1." in str(waiting.error)


@pytest.mark.slow
def test_process_0_that_started_later_still_names_the_missing_process():
    """Only it knows which one is missing, so the others wait slightly past their own timeout."""
    waiting = Gathering(timeout=3, count=3, delay=1)
    with pytest.raises(UserError, match=r"1 of 3 processes did not connect: 1[.]"):
        rendezvous.join(waiting.address, member(2, 3), 3, token=TOKEN)


def test_process_0_listens_only_at_its_address(gathering):
    gathering.connect().close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", gathering.address.port))


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", ""), ("no-such-host.invalid", "")],
)
def test_address_of_this_machine(host, address):
    assert cluster.local_address(host) == address


def test_a_short_token_is_refused(monkeypatch):
    monkeypatch.setenv(cluster.TOKEN, "secret")
    with pytest.raises(UserError, match=f"{cluster.TOKEN} has 6 characters"):
        cluster.read_token()


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [("0.0.0.0", "", True), ("0.0.0.0", TOKEN.decode(), False), ("127.0.0.1", "", False)],
)
def test_a_run_that_others_can_reach_is_warned_without_a_token(host, token, warned, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("t5x"), "propagate", True)
    monkeypatch.setenv(cluster.TOKEN, token)
    with pytest.raises(UserError, match="1 of 2 processes"):
        multiprocess.start(
            coordinator_address=f"{host}:{free_port()}", process_count=2, process_index=0, initialization_timeout=1
        )
    assert (f"{cluster.TOKEN} is not set" in caplog.text) == warned


def test_unauthenticated_connections_neither_end_a_run_nor_join_it():
    """They come first: one of another run, one that takes a place, and some that speak no protocol of ours."""
    port = free_port()
    (leader,) = begin("bound", 2, port=port, only=[0], T5X_CLUSTER_TOKEN="0123456789abcdef")
    place = vars(member(1)) | {"pid": os.getpid()}
    lines = [json.dumps(place | {"count": 3}), json.dumps(place), "GET / HTTP/1.1\r\n", "x" * 100_000, ""]
    strangers = [connect(port) for _ in lines]
    for stranger, line in zip(strangers, lines, strict=True):
        with contextlib.suppress(ConnectionError):
            stranger.sendall(f"{line}\n".encode() if line else b"")
    others = begin("bound", 2, port=port, only=[1], T5X_CLUSTER_TOKEN="0123456789abcdef")
    for done in finish([leader, *others]):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"processes": 2, "JAX's service is open at 127.0.0.2": False}
    for stranger in strangers:
        stranger.close()


# --- Connections ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    leader, member = pair_of(TOKEN, TOKEN)
    for end in (member, leader, member):
        assert end.receive() == []
    assert leader.authenticated and member.authenticated
    yield leader, member
    leader.close()
    member.close()


def pair_of(*tokens: bytes) -> tuple[Channel, Channel]:
    pair = socket.socketpair()
    leader, member = (Channel(s, t, leads=n == 0) for n, (s, t) in enumerate(zip(pair, tokens, strict=True)))
    return leader, member


def test_messages_arrive_in_order(ends):
    leader, member = ends
    member.send({"a": 1})
    member.send({})
    leader.send({"b": 2})
    member.send({"a": 3})
    assert leader.receive() == [{"a": 1}, {}, {"a": 3}]
    assert member.receive() == [{"b": 2}]


def test_message_longer_than_a_packet_arrives_whole(ends):
    leader, member = ends
    member.send({"text": "x" * 100_000})
    received = []
    while not received:
        received = leader.receive()
    assert received == [{"text": "x" * 100_000}]


def test_silence_ends_with_the_next_message(ends):
    leader, member = ends
    leader.silent = 3.0
    member.send({})
    leader.receive()
    assert leader.silent == 0


def test_the_token_is_not_sent():
    leader, member = pair_of(TOKEN, TOKEN)
    member.receive()
    member.send({"a": 1})
    sent = leader.socket.recv(1 << 16)
    assert sent.count(b"\n") == 3 and TOKEN not in sent and TOKEN.hex().encode() not in sent


@pytest.mark.parametrize("token", [b"another token, not ours", b""], ids=["another", "none"])
def test_another_token_is_noticed_by_both_ends(token):
    leader, member = pair_of(TOKEN, token)
    member.receive()
    with pytest.raises(Unauthenticated):
        leader.receive()
    with pytest.raises(Unauthenticated):
        member.receive()
    assert not leader.authenticated and not member.authenticated


@pytest.mark.parametrize("to", ["leader", "member"])
def test_recorded_handshake_of_another_connection_is_refused(to):
    """Nonce, proof and message were valid there, but the proof answered another nonce."""
    leader, member = pair_of(TOKEN, TOKEN)
    receiver, sender = (leader, member) if to == "leader" else (member, leader)
    sender.receive()
    sender.send({"error": "x", "code": 2})
    recorded = receiver.socket.recv(1 << 16)
    peer, attacker = socket.socketpair()
    victim = Channel(peer, TOKEN, leads=to == "leader")
    attacker.sendall(recorded)
    with pytest.raises(Unauthenticated):
        victim.receive()


@pytest.mark.parametrize("leads", [True, False])
def test_reflected_handshake_is_refused(leads):
    """The attacker returns whatever it receives, so that both ends have sent the same nonce."""
    peer, attacker = socket.socketpair()
    victim = Channel(peer, TOKEN, leads=leads)
    attacker.sendall(attacker.recv(1 << 16))
    assert victim.receive() == []
    attacker.sendall(attacker.recv(1 << 16))
    with pytest.raises(Unauthenticated):
        victim.receive()


OTHER_PROTOCOLS = {"HTTP": b"GET / HTTP/1.1\r\n\r\n", "empty": b"\n", "JSON": b'{"index": 1}\n', "long": b"x" * 70_000}


@pytest.mark.parametrize("sent", OTHER_PROTOCOLS.values(), ids=OTHER_PROTOCOLS)
def test_another_protocol_is_refused(sent):
    near, far = socket.socketpair()
    channel = Channel(near, TOKEN, leads=True)
    far.sendall(sent)
    with pytest.raises(EOFError):
        channel.receive()
    near.close()
    far.close()


@pytest.mark.parametrize("line", [b"not JSON\n", b"[1]\n", b'{"a": \xff}\n'], ids=repr)
def test_line_that_is_not_a_json_object_ends_the_connection(ends, line):
    leader, member = ends
    member.socket.sendall(line)
    with pytest.raises(EOFError):
        leader.receive()
