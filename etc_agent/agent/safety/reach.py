"""Whether the other nodes of the job are in reach, asked by connecting to their stores."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Sequence

from etc_agent.reconfig.fencing import are_in_reach

_EVERY_S = 0.5
_MOST_ASKED = 16


class Reach:
    """Asks while it is told to, from a thread of its own: names may take their time to be resolved."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._others: Sequence[str] = ()
        self._is_wanted = False
        self._addresses: dict[str, str] = {}
        self._closed = threading.Event()
        self.answered_at = float("-inf")
        """When most nodes were last in reach, in time.monotonic() seconds."""
        threading.Thread(target=self._run, name="reach", daemon=True).start()

    def want(self, others: Sequence[str], *, now: bool) -> None:
        """`others`: the stores to ask, as ``host:port``. `now`: ask them; else only learn their addresses, for the name
        server may be on the other side of a cut."""
        self._others, self._is_wanted = others, now

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            others = self._others
            known = [store for store in others if self._resolve(store)]
            if not self._is_wanted or not others:
                continue
            asked = random.sample(known, min(len(known), _MOST_ASKED))
            started = time.monotonic()
            if are_in_reach(max(1, len(asked)), asyncio.run(self._ask(asked))):
                self.answered_at = started

    def _resolve(self, store: str) -> str:
        """The address of the store's host, "" where there is none."""
        host = store.rpartition(":")[0]
        if host not in self._addresses:
            try:
                self._addresses[host] = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
            except OSError:
                return ""
        return self._addresses[host]

    async def _ask(self, stores: Sequence[str]) -> int:
        return sum(await asyncio.gather(*(self._answers(store) for store in stores)))

    async def _answers(self, store: str) -> bool:
        host, _, port = store.rpartition(":")
        try:
            async with asyncio.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection(self._addresses[host], int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
