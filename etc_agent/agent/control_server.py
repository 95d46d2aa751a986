"""The agent's end of the control channel: a Unix socket in a folder that only this user can enter."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from etc_agent.agent.peers import objection
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Hello, Message

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class ControlServer:
    """Accepts workers and the processes that they start, and passes their messages on; others are rejected (`peers`).

    `on_message(hello, channel, message)` is called from reader threads. `hello` is the connection's first message,
    which identifies the worker, and is itself passed on first. The last message is None: the worker has closed the
    connection.
    """

    def __init__(self, folder: Path, on_message: Callable[[Hello, Channel, Message | None], None]) -> None:
        self.path = folder / "control.sock"
        self._on_message = on_message
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(64)
        self._channels: set[Channel] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="control-accept", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        for channel in list(self._channels):
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.error("the control socket cannot accept a connection, and tries again: %s", error.strerror)
                time.sleep(_RETRY_S)
                continue
            channel = Channel(connection)
            peer = channel.peer()
            if (why := objection(peer)) is not None:
                logger.warning("process %d may not use the control socket and was rejected: %s", peer.pid, why)
                channel.close()
                continue
            self._channels.add(channel)
            threading.Thread(target=self._read, args=(channel,), name="control-read", daemon=True).start()

    def _read(self, channel: Channel) -> None:
        hello: Hello | None = None
        try:
            while True:
                try:
                    message = channel.receive()
                except ValueError as error:
                    logger.warning("a message on the control socket was ignored: %s", error)
                    continue
                if message is None:
                    break
                if hello is None and isinstance(message, Hello):
                    hello = message
                if hello is None:
                    logger.warning("a message on the control socket was ignored: %s came before hello", message.type)
                    continue
                self._on_message(hello, channel, message)
        finally:
            self._channels.discard(channel)
            channel.close()
            if hello is not None:
                self._on_message(hello, channel, None)
