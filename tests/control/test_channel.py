"""The control channel over real sockets: whatever comes, what follows is heard."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etc_agent.agent.control_server import ControlServer
from etc_agent.control import channel as framing
from etc_agent.control.causes import ErrorKind
from etc_agent.control.channel import Channel, MessageTooLargeError
from etc_agent.control.messages import Armed, Message, Progress, Raised, decode, encode
from tests.control.frames import FROM_AGENTS, FROM_WORKERS, HELLO, frame, framed, payloads

SAID = payloads(FROM_WORKERS)

@contextmanager
def served(folder: Path) -> Iterator[tuple[socket.socket, queue.SimpleQueue[Any]]]:
    """A connection to an agent's control server, and what the agent's loop is given."""
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    server = ControlServer(folder, lambda hello, channel, message: heard.put(message))
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(str(server.path))
    try:
        yield client, heard
    finally:
        client.close()
        server.close()
        server.path.unlink()


def next_of(heard: queue.SimpleQueue[Any], kind: type[Message]) -> Message:
    while not isinstance(message := heard.get(timeout=10), kind):
        assert message is not None, "the connection was closed"
    return message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(SAID, max_size=3), after=st.lists(SAID, max_size=4))
def test_no_message_keeps_the_agent_from_hearing_the_next(
    before: list[bytes], after: list[bytes], tmp_path: Path
) -> None:
    last = Raised("the last word", ErrorKind.UNCLEAR)
    said = [*map(frame, before), framed(HELLO), *map(frame, after), framed(last)]
    with served(tmp_path) as (client, heard):
        client.sendall(b"".join(said))
        assert next_of(heard, Raised) == last


@pytest.mark.parametrize(
    "payload", [b"\xff\xfe{}", b"[" * 200_000, b"", b'{"type": ["hello"]}', b"9" * 5000, b'{"type": "armed"}'],
    ids=["no UTF-8", "nested", "empty", "type is a list", "number too long", "field missing"],
)
def test_a_malformed_message_is_left_out(payload: bytes, tmp_path: Path) -> None:
    with served(tmp_path) as (client, heard):
        client.sendall(framed(HELLO) + frame(payload) + framed(Progress(1, 2, 3, 0.5)))
        assert next_of(heard, Progress) == Progress(1, 2, 3, 0.5)


def test_a_message_too_large_is_left_out_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 3 << 20)
    with served(tmp_path) as (client, heard):
        channel = Channel(client)
        channel.send(HELLO)
        with pytest.raises(MessageTooLargeError, match="'raised' of 4,000,0"):
            channel.send(Raised("x" * 4_000_000))
        client.sendall(frame(b"x" * (5 << 20)))
        channel.send(Raised("y"))
        assert next_of(heard, Raised) == Raised("y")


@settings(max_examples=300, deadline=None)
@given(payload=payloads([*FROM_WORKERS, *FROM_AGENTS]))
def test_what_is_taken_for_a_message_is_one_in_every_field(payload: bytes) -> None:
    try:
        message = decode(json.loads(payload))
    except ValueError:
        return
    assert decode(json.loads(json.dumps(encode(message)))) == message


def test_a_peer_that_does_not_read_gives_the_sender_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "SEND_S", 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel, ended = Channel(ours), threading.Event()

    def send() -> None:
        with pytest.raises(TimeoutError, match="was not read within 1 s"):
            channel.send(Raised("x" * 10_000_000))
        with pytest.raises(OSError, match="Bad file descriptor"):
            channel.send(Armed(1))
        ended.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert ended.wait(20)
    theirs.close()
