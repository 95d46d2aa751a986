"""The control socket's framing: a four-byte length, then one JSON object. Unix sockets, same user only."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading

from etc_agent.control.messages import Message, decode, encode

SOCKET_VARIABLE = "ETC_CONTROL_SOCKET"
SLOT_VARIABLE = "ETC_SLOT"
GENERATION_VARIABLE = "ETC_GENERATION"
JOINING_VARIABLE = "ETC_JOINING"
SPARE_GENERATION = 0
"""What a warm spare says it was started for."""
STACKS_SIGNAL = signal.SIGRTMIN + 6
"""Makes a worker that has said hello write all its stacks to standard error. Nothing else is known to use it."""
MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("!I")


class Channel:
    """Messages over one connected Unix stream socket. `send` may be called from any thread; `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
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

    def peer_uid(self) -> int:
        """The user id of the process at the other end."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return struct.unpack("3i", credentials)[1]

    def send(self, message: Message) -> None:
        """Send one message whole.

        Raises:
            OSError: the other end is gone.
        """
        payload = json.dumps(encode(message), separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"control message of {len(payload)} bytes; at most {MAX_FRAME_BYTES} go through")
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

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
            raise ValueError(f"control frame announces {length} bytes; at most {MAX_FRAME_BYTES} are read")
        payload = self._read(length)
        return None if payload is None else decode(json.loads(payload))

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

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


def same_user(channel: Channel) -> bool:
    """Whether the other end runs as this user, the only one who may command workers."""
    return channel.peer_uid() == os.getuid()
