"""This node's TCPStores, at which the workers of a generation meet.

``env://`` keeps its keys at the top level of the store and never removes them, and a process group that finds addresses
of processes that have ended waits for them in vain. So each fresh generation meets at a store that was never used
before.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import TCPStore

from etc_agent.rendezvous.ports import ANY_PORT, PortRange
from etc_agent.torch_store import serve_store

_TIMEOUT_S = 60.0
_NUM_KEPT = 3
"""Old stores that stay open: workers that are being stopped may still use the store of their generation."""


class Stores:
    """The stores that this agent hosts on `ports` of `address`, the newest of which is published in its node's
    record."""

    def __init__(self, address: str, ports: PortRange = ANY_PORT) -> None:
        self._address, self._ports = address, ports
        self._stores: dict[int, TCPStore] = {}
        self.open()

    @property
    def port(self) -> int:
        """The port of the newest store."""
        return next(reversed(self._stores))

    def open(self, in_use: Iterable[int] = ()) -> int:
        """Open a store on a free port, which is returned; close old ones, except those on the ports `in_use`."""
        store = serve_store(self._address, _TIMEOUT_S, self._ports)
        self._stores[store.port] = store
        needed = {*in_use, *list(self._stores)[-_NUM_KEPT:]}
        self._stores = {port: store for port, store in self._stores.items() if port in needed}
        return store.port
