"""What may come over a control socket: messages, messages spoilt, and anything at all."""

from __future__ import annotations

import json
import struct

from hypothesis import strategies as st

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import (
    Armed,
    Described,
    Hello,
    Message,
    Prepare,
    Progress,
    Refused,
    Switched,
    Withdrawn,
    encode,
)

HELLO = Hello(local_rank=0, pid=1, generation=1)
FROM_WORKERS: list[Message] = [
    HELLO,
    Progress(1, 2, 3, 0.5),
    Refused(2, "no", ErrorKind.MODEL),
    Described("PP1TP1DP1", {"ranks": []}),
    Switched(2, 7, {"vote": 1.0}, 1, 2, 3),
]
FROM_AGENTS: list[Message] = [Prepare("a", {"id": 2}, {"id": 1}), Armed(7), Withdrawn(3, "no")]

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def _spoilt(draw: st.DrawFn, messages: list[Message]) -> bytes:
    """A message with one field changed, left out, or one that it does not have."""
    value = encode(draw(st.sampled_from(messages)))
    field = draw(st.sampled_from([*value, "unknown"]))
    if draw(st.booleans()):
        value[field] = draw(_json_values)
    else:
        value.pop(field, None)
    return json.dumps(value).encode()


def payloads(messages: list[Message]) -> st.SearchStrategy[bytes]:
    """Contents of frames."""
    anything = _json_values.map(lambda value: json.dumps(value).encode())
    return st.binary(max_size=40) | anything | _spoilt(messages)


def frame(payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + payload


def framed(message: Message) -> bytes:
    return frame(json.dumps(encode(message)).encode())
