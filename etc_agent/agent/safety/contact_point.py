"""The contact point: where this node's agent tells other agents directly whether it hears etcd.

A stopped agent does not answer here, although its kernel still completes the TCP handshake.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from etc_agent.agent.safety.peer_status import LONGEST_BYTES, Speaker
from etc_agent.reconfig.fencing import PeerStatus
from etc_agent.rendezvous.addresses import listen_for
from etc_agent.rendezvous.ports import ANY_PORT, PortRange

_CALLER_S = 2.0


class ContactPoint:
    """Listens from its constructor on, on a free one of `ports` at `address`, or at all addresses where this host does
    not have that one (it is behind NAT).

    `own`: returns this agent's status. `heard(node, status)`: is called with a caller's status. Both are called from a
    thread of this object.
    """

    def __init__(
        self, address: str, speaker: Speaker, own: Callable[[], PeerStatus], heard: Callable[[str, PeerStatus], None],
        ports: PortRange = ANY_PORT,
    ) -> None:
        self._speaker, self._own, self._heard = speaker, own, heard
        self._socket = listen_for(address, ports)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="contact-point", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, sock=self._socket, limit=LONGEST_BYTES)
        )
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CALLER_S):
                spoke_at = time.monotonic()
                writer.write(self._speaker.encode(self._own()))
                await writer.drain()
                said = self._speaker.decode(await reader.readline(), spoke_at)
            if said is not None:
                self._heard(*said)
        except (OSError, TimeoutError, ValueError):  # the last for a line that is too long
            pass
        finally:
            writer.close()
