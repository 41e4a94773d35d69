"""Connections between processes: both ends prove that they have the token, and a recorded proof is useless later."""

import socket
from collections.abc import Iterator

import pytest

from t5x.partitioning.link import Channel, Unauthenticated

TOKEN = b"0123456789abcdef"


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    leader, member = connect(TOKEN, TOKEN)
    for end in (member, leader, member):
        assert end.receive() == []
    assert leader.authenticated and member.authenticated
    yield leader, member
    leader.close()
    member.close()


def connect(*tokens: bytes) -> tuple[Channel, Channel]:
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
    leader, member = connect(TOKEN, TOKEN)
    member.receive()
    member.send({"a": 1})
    sent = leader.socket.recv(1 << 16)
    assert sent.count(b"\n") == 3 and TOKEN not in sent and TOKEN.hex().encode() not in sent


@pytest.mark.parametrize("token", [b"another token, not ours", b""], ids=["another", "none"])
def test_another_token_is_noticed_by_both_ends(token):
    leader, member = connect(TOKEN, token)
    member.receive()
    with pytest.raises(Unauthenticated):
        leader.receive()
    with pytest.raises(Unauthenticated):
        member.receive()
    assert not leader.authenticated and not member.authenticated


@pytest.mark.parametrize("to", ["leader", "member"])
def test_recorded_handshake_of_another_connection_is_refused(to):
    """Nonce, proof and message were valid there, but the proof answered another nonce."""
    leader, member = connect(TOKEN, TOKEN)
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
