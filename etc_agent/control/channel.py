"""The control socket's framing: a four-byte length, then one JSON object. Unix sockets, same user only."""

from __future__ import annotations

import json
import signal
import socket
import struct
import threading
from dataclasses import dataclass

from etc_agent.control.messages import Message, decode, encode

SOCKET_VARIABLE = "ETC_CONTROL_SOCKET"
SLOT_VARIABLE = "ETC_SLOT"
GENERATION_VARIABLE = "ETC_GENERATION"
JOINING_VARIABLE = "ETC_JOINING"
SPARE_GENERATION = 0
"""The generation that a warm spare names in its Hello."""
STACKS_SIGNAL = signal.SIGRTMIN + 6
"""Makes a worker that has sent Hello write the stacks of all threads to standard error. Nothing else is known to use
it.
"""
MAX_FRAME_BYTES = 256 << 20
SEND_S = 10
"""Seconds that the other end may take to read a message: a stopped worker must not block its agent."""
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class Credentials:
    """A process and its user. `pid`: 0 where the process is not visible from here (another container)."""

    pid: int
    uid: int


class MessageTooLargeError(ValueError):
    """A control message is larger than the receiver accepts. Nothing of it was sent."""


class Channel:
    """Messages over one connected Unix stream socket. `send` may be called from any thread; `receive` from one.

    A ValueError of either concerns that one message only: the next one is sent and received normally.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._send_lock = threading.Lock()

    @classmethod
    def connect(cls, path: str, timeout_s: float = 10.0) -> Channel:
        """Connect to the agent's socket at `path`.

        Raises:
            OSError: nobody listens there.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.settimeout(None)
        return cls(connection)

    def peer(self) -> Credentials:
        """The process at the other end, as the kernel knows it."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        return Credentials(pid, uid)

    def send(self, message: Message) -> None:
        """Send one message whole.

        Raises:
            OSError: the other end is gone, or has not read for `SEND_S`, which closes the connection.
            MessageTooLargeError: it is larger than `MAX_FRAME_BYTES`.
        """
        payload = json.dumps(encode(message), separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME_BYTES:
            what = f"control message {message.type!r} of {len(payload):,} bytes"
            raise MessageTooLargeError(f"{what}; at most {MAX_FRAME_BYTES:,} go through")
        with self._send_lock:
            try:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
            except BlockingIOError:
                self.close()  # part of a message may have been sent, so nothing can follow it
                raise TimeoutError(f"{message.type!r} was not read within {SEND_S} s") from None

    def receive(self) -> Message | None:
        """The next message, or None when the other end has closed.

        Raises:
            ValueError: what came is not a control message.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME_BYTES:
            if not self._skip(length):
                return None
            raise ValueError(f"it has {length:,} bytes; at most {MAX_FRAME_BYTES:,} are accepted")
        payload = self._read(length)
        return None if payload is None else decode(_json(payload))

    def end_of_input(self) -> None:
        """Nothing more comes from the other end: `receive` returns what has come already, then None."""
        try:
            self._socket.shutdown(socket.SHUT_RD)
        except OSError:  # it is closed
            pass

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _skip(self, count: int) -> bool:
        """Read `count` bytes and keep none; whether they came."""
        while count > 0:
            part = self._read(min(count, 1 << 20))
            if part is None:
                return False
            count -= len(part)
        return True

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(min(count - len(parts), 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def _json(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except RecursionError:
        raise ValueError("a control message is nested too deeply") from None
