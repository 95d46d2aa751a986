"""A worker's end of the control socket, alone with whatever the agent may send."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.control import channel as framing
from etc_agent.control.causes import ErrorKind
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Describe, Described, Hello, Message, Position, WhereAreYou
from etc_agent.integrations.native import TrainState
from etc_agent.worker.change.conversation import Conversation
from etc_agent.worker.change.retire import Retirements
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.loss.latch import Latch
from etc_agent.worker.process.position import Whereabouts
from etc_agent.worker.settings import Settings
from tests.control.frames import FROM_AGENTS, frame, framed, payloads


def build(parallel: ParallelContext) -> TrainState:
    raise KeyError("a bug in build")


@contextmanager
def conversing() -> Iterator[tuple[socket.socket, Channel, Conversation]]:
    """A worker's conversation, and the agent's end of it: to write bytes, and to read messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(30)
    given = Settings(
        torch.device("cpu"), global_batch=GlobalBatch(4), seed=0, timeout_s=5.0, switch_timeout_s=5.0,
        abort_timeout_s=1.0, loss_timeout_s=5.0, record=None,
    )
    conversation = Conversation(
        Channel(theirs), 0, 1, build, given, Latch(), lambda: None, Whereabouts(), Retirements()
    )
    conversation.start()
    try:
        yield ours, Channel(ours), conversation
    finally:
        conversation.close()
        ours.close()


def next_of(channel: Channel, kind: type[Message]) -> Message:
    while not isinstance(message := channel.receive(), kind):
        assert message is not None, "the worker has closed"
    return message


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(payloads(FROM_AGENTS), max_size=4))
def test_no_message_keeps_a_worker_from_hearing_the_next(sent: list[bytes]) -> None:
    with conversing() as (agent, channel, _):
        assert isinstance(channel.receive(), Hello)
        agent.sendall(b"".join(map(frame, sent)) + framed(WhereAreYou()))
        assert isinstance(next_of(channel, Position), Position)


def test_a_config_that_cannot_be_read_and_a_model_that_cannot_be_built_are_answered() -> None:
    with conversing() as (agent, channel, _):
        for config, kind in (("rubbish", ErrorKind.RAISED), ("DP3", ErrorKind.MODEL), ("DP2", ErrorKind.RAISED)):
            agent.sendall(framed(Describe(config)))
            described = next_of(channel, Described)
            assert isinstance(described, Described)
            assert (described.layout, described.kind) == (None, kind)


def test_a_layout_too_large_to_be_told_is_answered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 300)
    with conversing() as (_, channel, conversation):
        conversation.send(Described("DP1", {"tensors": ["x"] * 100}))
        described = next_of(channel, Described)
        assert isinstance(described, Described)
        assert (described.layout, described.kind) == (None, ErrorKind.RAISED)
        assert "at most 300 go through" in described.error
