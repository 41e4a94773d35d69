"""Messages between processes: only the other end of this connection can have made them."""

import hashlib
import hmac
import json
import socket
from collections.abc import Iterator

import pytest

from t5x.partitioning.link import Link, Unauthenticated

TOKEN = b"0123456789abcdef"


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    leader, member = connect(TOKEN, TOKEN)
    yield leader, member
    leader.close()
    member.close()


def connect(*tokens: bytes) -> tuple[Link, Link]:
    pair = socket.socketpair()
    leader, member = (Link(s, t, leads=n == 0) for n, (s, t) in enumerate(zip(pair, tokens, strict=True)))
    assert leader.receive() == member.receive() == [] and leader.ready and member.ready
    return leader, member


def test_messages_arrive_in_order(ends):
    leader, member = ends
    member.send({"a": 1})
    member.send()
    leader.send({"b": 2})
    member.send({"a": 3})
    assert leader.receive() == [{"a": 1}, {}, {"a": 3}]
    assert member.receive() == [{"b": 2}]


def test_the_token_is_not_sent(ends):
    leader, member = ends
    member.send({"a": 1})
    sent = leader.socket.recv(1 << 16)
    assert TOKEN not in sent and TOKEN.hex().encode() not in sent


def test_another_token_is_noticed_by_both_ends():
    leader, member = connect(TOKEN, b"another token, not ours")
    member.send({"index": 1})
    with pytest.raises(Unauthenticated):
        leader.receive()
    leader.send({"verdict": "end"})
    with pytest.raises(Unauthenticated):
        member.receive()


@pytest.mark.parametrize("how", ["plain", "another key", "altered", "replayed", "reflected"])
def test_a_forged_message_is_refused(ends, how):
    leader, member = ends
    failed = json.dumps({"failed": "x", "code": 2}).encode()
    member.send({"a": 1})
    real = leader.socket.recv(1 << 16, socket.MSG_PEEK)
    assert leader.receive() == [{"a": 1}]
    if how == "reflected":
        leader.send({"a": 1})
        real = member.socket.recv(1 << 16)
    forged = {
        "plain": failed + b"\n",
        "another key": hmac.digest(b"guess", b"0 1 " + failed, hashlib.sha256).hex().encode() + b" " + failed + b"\n",
        "altered": real.replace(b"1}", b"2}"),
        "replayed": real,
        "reflected": real,
    }[how]
    member.socket.sendall(forged)
    with pytest.raises(Unauthenticated):
        leader.receive()


@pytest.mark.parametrize("to", ["leader", "member"])
def test_recorded_bytes_of_another_connection_are_refused(to):
    """Nonce and first message were valid there, but they answered another nonce."""
    links = [Link(end, TOKEN, leads=n == 0) for n, end in enumerate(socket.socketpair())]
    receiver, sender = links if to == "leader" else reversed(links)
    sender.receive()
    sender.send({"failed": "x", "code": 2})
    recorded = receiver.socket.recv(1 << 16)
    peer, attacker = socket.socketpair()
    victim = Link(peer, TOKEN, leads=to == "leader")
    attacker.sendall(recorded)
    with pytest.raises(Unauthenticated):
        victim.receive()


def test_reordered_messages_are_refused(ends):
    leader, member = ends
    member.send({"a": 1})
    member.send({"a": 2})
    first, second = leader.socket.recv(1 << 16).splitlines(keepends=True)
    member.socket.sendall(second + first)
    with pytest.raises(Unauthenticated):
        leader.receive()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b'{"index": 1}\n', b"x" * 70_000], ids=repr)
def test_another_protocol_is_refused(sent):
    ours, theirs = socket.socketpair()
    link = Link(ours, TOKEN, leads=True)
    theirs.sendall(sent)
    with pytest.raises(EOFError):
        while True:
            link.receive()
