"""Asks the agents of other nodes directly whether they hear etcd and whether they have workers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping

from etc_agent.agent.safety.peer_status import LONGEST_BYTES, Speaker
from etc_agent.reconfig.fencing import PeerStatus

_MOST_AT_ONCE = 128
"""Questions in flight: a job may have more nodes than a process may have open files."""


class Reach:
    """Asks the given nodes again and again, from a thread of its own.

    Nodes that do not answer delay no others. `every_s`: the pause between two questions to one node. `timeout_s`: for
    one question. `own`: returns this agent's status. `heard(node, status)`: is called with each answer. Both are called
    from the thread.
    """

    def __init__(
        self,
        speaker: Speaker,
        own: Callable[[], PeerStatus],
        heard: Callable[[str, PeerStatus], None],
        *,
        every_s: float,
        timeout_s: float,
    ) -> None:
        self._speaker, self._own, self._heard = speaker, own, heard
        self._every_s, self._timeout_s = every_s, timeout_s
        self._asked: Mapping[str, str] = {}
        self._known: Mapping[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="reach", daemon=True)
        self._thread.start()

    def want(self, asked: Mapping[str, str], known: Mapping[str, str]) -> None:
        """`asked`: node -> ``host:port`` of its contact point, for the nodes to ask from now on. `known`: the same for
        nodes that may have to be asked later: their names are resolved now, since a name server may not be reachable
        then."""
        self._asked, self._known = asked, known

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()
        self._thread.join()

    async def _run(self) -> None:
        at_once, under_way = asyncio.Semaphore(_MOST_AT_ONCE), dict[str, asyncio.Task[None]]()
        while not self._closed.is_set():
            under_way = {node: task for node, task in under_way.items() if not task.done()}
            asked = self._asked
            for node, address in {**self._known, **asked}.items():
                if node in under_way:
                    continue
                if node in asked:
                    under_way[node] = asyncio.create_task(self._ask(address, at_once))
                elif _host(address) not in self._addresses:
                    under_way[node] = asyncio.create_task(self._resolve(_host(address)))
            await asyncio.sleep(self._every_s)
        for task in under_way.values():
            task.cancel()

    async def _resolve(self, host: str) -> None:
        try:
            found = asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            self._addresses[host] = str((await asyncio.wait_for(found, self._timeout_s))[0][4][0])
        except (OSError, TimeoutError):
            pass  # asked again after `every_s`

    async def _ask(self, address: str, at_once: asyncio.Semaphore) -> None:
        if _host(address) not in self._addresses:
            await self._resolve(_host(address))
            return
        async with at_once:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._talk(self._addresses[_host(address)], int(address.rpartition(":")[2]))
            except (OSError, TimeoutError, ValueError):  # the last for a line that is too long
                pass

    async def _talk(self, host: str, port: int) -> None:
        asked_at = time.monotonic()
        reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_BYTES)
        try:
            said = self._speaker.decode(await reader.readline(), asked_at)
            writer.write(self._speaker.encode(self._own()))
            await writer.drain()
        finally:
            writer.close()
        if said is not None:
            self._heard(*said)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
